//! The flags that name convolutions: which problems, passes, memory format and type.

use std::path::PathBuf;

use crate::conv::Pass;
use crate::{DType, MemoryFormat};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};

/// Which convolutions to take.
#[derive(Args)]
pub(crate) struct ProblemArgs {
    /// Convolutions, in benchdnn's notation (`mb32ic64ih56oc64kh3ph1`) or as `i128x36x12,k64x6x3,b256`.
    #[arg(value_name = "PROBLEM")]
    pub(crate) problems: Vec<String>,

    /// File with one problem per line, `#` starts a comment; may be given several times.
    #[arg(long, value_name = "FILE", help_heading = "Problems")]
    pub(crate) suite: Vec<PathBuf>,

    /// Passes of a training step [default: all].
    #[arg(long, value_enum, value_name = "PASS", value_delimiter = ',', help_heading = "Problems")]
    pub(crate) pass: Vec<PassName>,

    /// Memory format of the tensors; nhwc (channels-last) is what training on CPUs should use.
    #[arg(long, value_enum, default_value_t = FormatName::Nhwc, help_heading = "Problems")]
    pub(crate) format: FormatName,

    /// Type of the tensors. With bf16, as `train --precision bf16` has it, and with f16 weights and sums are f32.
    #[arg(long, visible_alias = "precision", value_parser = dtype(), default_value = "f32", help_heading = "Problems")]
    pub(crate) dtype: DType,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PassName {
    Fwd,
    BwdData,
    BwdWeights,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatName {
    Nchw,
    Nhwc,
}

impl ProblemArgs {
    pub(crate) fn format(&self) -> MemoryFormat {
        match self.format {
            FormatName::Nchw => MemoryFormat::Contiguous,
            FormatName::Nhwc => MemoryFormat::ChannelsLast,
        }
    }
}

/// Reads the name of a type.
fn dtype() -> impl TypedValueParser<Value = DType> {
    let named = |name: String| {
        DType::ALL.into_iter().find(|dtype| dtype.to_string() == name).expect("one of the names")
    };
    PossibleValuesParser::new(DType::ALL.map(|dtype| dtype.to_string())).map(named)
}

/// The passes that were asked for, in the order of a training step; all if none was named.
pub(crate) fn passes(names: &[PassName]) -> Vec<Pass> {
    let asked = |pass: &Pass| {
        let name = match pass {
            Pass::Forward => PassName::Fwd,
            Pass::BackwardData => PassName::BwdData,
            Pass::BackwardWeights => PassName::BwdWeights,
        };
        names.is_empty() || names.contains(&name)
    };
    Pass::ALL.into_iter().filter(asked).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_come_in_the_order_of_a_step() {
        assert_eq!(passes(&[]), Pass::ALL);
        assert_eq!(passes(&[PassName::BwdWeights, PassName::Fwd]), [Pass::Forward, Pass::BackwardWeights]);
    }
}
