//! What drops elements or samples where the model trains. In models it runs as a layer, which draws random numbers.

use super::*;

/// The drop of whole samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StochasticDepth {
    /// The probability that a sample is dropped.
    pub share: f64,
}

pub(super) const DROPOUT: Operator<()> = Operator {
    read: &[Reader("Dropout", (1, 3), |node| {
        if node.opset >= 12 {
            // Random numbers are drawn by who trains.
            node.attributes.ignore(&["seed"]);
        } else if let Some(share) = node.attributes.float("ratio")? {
            node.set_array(1, "ratio", Array::number(share as f32));
        }
        Ok(Op::Dropout)
    })],
    write: |(), to| {
        let mut inputs = vec![to.input(0).to_owned(), to.input(1).to_owned()];
        if to.file.training {
            let yes = Array::new(&[], Data::Bool(vec![true])).ok_or("it has no value")?;
            inputs.push(to.array("training", yes));
        }
        Ok(to.op().reads(inputs))
    },
    known: Known::Never,
    run: Run::One(|(), inputs| inputs.tensor(0)),
    uses: other,
    gives: like_first,
};

pub(super) const STOCHASTIC_DEPTH: Operator<StochasticDepth> = Operator {
    read: &[],
    // It drops samples in training only, and no operator of ONNX does.
    write: |_, to| Ok(to.named("Identity")),
    known: Known::Never,
    run: Run::One(|_, inputs| inputs.tensor(0)),
    uses: other,
    gives: like_first,
};
