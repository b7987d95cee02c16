//! Gives rank 0's state to all ranks.

use std::path::Path;

use convoke_autograd::{Error, Result};
use convoke_distributed::Communicator;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{NAME, failed};
use crate::Module;
use crate::checkpoint::{CheckpointError, Value, from_safetensors, model_values, set_model, to_safetensors};

/// Gives all ranks the parameters, buffers and counters of rank 0.
///
/// # Errors
/// If the models differ in names, shapes or types; if communication between ranks fails.
pub(crate) fn share_state(model: &(impl Module + ?Sized), communicator: &Communicator) -> Result<()> {
    check_structure(&structure(&model_values(model)), communicator)?;
    let mine = to_safetensors(&model_values(model)).map_err(refused)?;
    let mut theirs = convoke_memory::copied(&mine)?;
    communicator.share("model of rank 0", 0, &mut theirs).map_err(failed(NAME))?;
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

/// Gives rank 0's bytes to all ranks.
pub(crate) fn share_bytes(
    communicator: &Communicator,
    name: &str,
    mut bytes: Vec<u8>,
) -> convoke_distributed::Result<Vec<u8>> {
    communicator.share(name, 0, &mut bytes)?;
    Ok(bytes)
}

/// A named value of a model, without its numbers.
#[derive(Serialize, Deserialize, PartialEq)]
struct Entry {
    name: String,
    /// The element type of a tensor; a counter has none.
    dtype: Option<String>,
    shape: Vec<usize>,
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.dtype {
            Some(dtype) => write!(f, "{}: {dtype} of shape {:?}", self.name, self.shape),
            None => write!(f, "{}: a counter", self.name),
        }
    }
}

fn structure(values: &[(String, Value)]) -> Vec<Entry> {
    let entry = |(name, value): &(String, Value)| {
        let (dtype, shape) = match value {
            Value::Tensor(tensor) => (Some(tensor.dtype().to_string()), tensor.shape().to_vec()),
            Value::Count(_) => (None, Vec::new()),
        };
        Entry { name: name.clone(), dtype, shape }
    };
    values.iter().map(entry).collect()
}

/// All ranks must have the same entries.
fn check_structure(mine: &[Entry], communicator: &Communicator) -> Result<()> {
    let unreadable = |error: serde_json::Error| different(format!("the structure of a model: {error}"));
    let mine = serde_json::to_vec(mine).map_err(unreadable)?;
    let all = communicator.all_gather("structure of the model", &mine).map_err(failed(NAME))?;
    let Some(rank) = all.iter().position(|text| *text != all[0]) else { return Ok(()) };
    let parse = |json: &[u8]| serde_json::from_slice::<Vec<Entry>>(json).map_err(unreadable);
    let (first, other) = (parse(&all[0])?, parse(&all[rank])?);
    let pairs = (0..first.len().max(other.len())).map(|index| [first.get(index), other.get(index)]);
    let differing = pairs.into_iter().find(|[first, other]| first != other).unwrap_or_default();
    let [expected, found] = differing.map(|entry| entry.map_or("nothing more".into(), Entry::to_string));
    Err(different(format!("rank {rank} has another model than rank 0: {found}, where rank 0 has {expected}")))
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
