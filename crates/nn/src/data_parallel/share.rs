//! Giving rank 0's state to all ranks.

use std::path::Path;

use convoke_autograd::{Error, Result};
use convoke_distributed::Communicator;
use sha2::{Digest, Sha256};

use super::{NAME, failed};
use crate::Module;
use crate::checkpoint::{CheckpointError, Value, from_safetensors, model_values, set_model, to_safetensors};

/// Makes parameters, buffers and counters of every rank those of rank 0.
///
/// # Errors
/// If the models differ in names, shapes or types; if the ranks do not come together.
pub(crate) fn share_state(model: &(impl Module + ?Sized), communicator: &Communicator) -> Result<()> {
    check_structure(&structure(&model_values(model)), communicator)?;
    let mine = to_safetensors(&model_values(model)).map_err(refused)?;
    let theirs = share_bytes(communicator, "model of rank 0", mine.clone()).map_err(failed(NAME))?;
    let held = if mine == theirs {
        mine
    } else {
        let from = Path::new("model of rank 0");
        let values = from_safetensors(from, &theirs, &model_values(model)).map_err(refused)?;
        set_model(model, values).map_err(refused)?;
        to_safetensors(&model_values(model)).map_err(refused)?
    };
    let hashes =
        communicator.all_gather("hash of the model", &Sha256::digest(&held)).map_err(failed(NAME))?;
    match hashes.iter().position(|hash| *hash != hashes[0]) {
        None => Ok(()),
        Some(rank) => {
            Err(different(format!("rank {rank} does not hold what rank 0 gave it: their hashes differ")))
        }
    }
}

/// Rank 0's bytes, to all ranks.
pub(crate) fn share_bytes(
    communicator: &Communicator,
    name: &str,
    mut bytes: Vec<u8>,
) -> convoke_distributed::Result<Vec<u8>> {
    let mut len = [bytes.len() as u64];
    communicator.broadcast(name, 0, &mut len)?;
    // Rank 0 holds as many, so this is no claim out of thin air.
    bytes.resize(len[0] as usize, 0);
    communicator.broadcast(name, 0, &mut bytes)?;
    Ok(bytes)
}

/// Names, types and shapes, a line each.
fn structure(values: &[(String, Value)]) -> String {
    let line = |(name, value): &(String, Value)| match value {
        Value::Tensor(tensor) => format!("{name}: {} of shape {:?}\n", tensor.dtype(), tensor.shape()),
        Value::Count(_) => format!("{name}: a counter\n"),
    };
    values.iter().map(line).collect()
}

/// All ranks must have the same lines.
fn check_structure(mine: &str, communicator: &Communicator) -> Result<()> {
    let all = communicator.all_gather("structure of the model", mine.as_bytes()).map_err(failed(NAME))?;
    let Some(rank) = all.iter().position(|text| *text != all[0]) else { return Ok(()) };
    let [first, other] = [&all[0], &all[rank]].map(|text| String::from_utf8_lossy(text));
    let (mut first, mut other) = (first.lines(), other.lines());
    loop {
        let lines = [first.next(), other.next()];
        if lines[0] != lines[1] {
            let [expected, found] = lines.map(|line| line.unwrap_or("nothing more"));
            return Err(different(format!(
                "rank {rank} has another model than rank 0: {found}, where rank 0 has {expected}"
            )));
        }
    }
}

fn different(reason: String) -> Error {
    Error::Communication { operation: NAME, reason }
}

fn refused(error: CheckpointError) -> Error {
    match error {
        CheckpointError::Tensor(error) => error,
        error => different(error.to_string()),
    }
}
