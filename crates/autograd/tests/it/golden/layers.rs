//! The layers of `layers.safetensors`.

use super::{Run, check_file};
use convoke_autograd::ops::{self, Conv1dOptions, ConvTransposeOptions, Padding, Pool1dOptions};
use convoke_autograd::{Result, Tensor};

impl Run<'_> {
    fn size(&self, path: &str) -> usize {
        self.case.number(path) as usize
    }

    fn transposed(&self) -> ConvTransposeOptions {
        let sizes = self.case.sizes("padding");
        ConvTransposeOptions {
            stride: self.pair("stride"),
            padding: Padding { top: sizes[0], bottom: sizes[1], left: sizes[2], right: sizes[3] },
            output_padding: self.pair("output_padding"),
            dilation: self.pair("dilation"),
            groups: self.size("groups"),
        }
    }

    fn layer(&self) -> Result<Tensor> {
        let x = self.x();
        let (weight, bias) = (self.leaf("weight"), self.leaf("bias"));
        let (weight, bias) = (weight.as_ref(), bias.as_ref());
        match self.case.text("operation") {
            "conv_transpose2d" => ops::conv_transpose2d(&x, weight.unwrap(), bias, &self.transposed()),
            "conv1d" => {
                let [stride, padding, dilation, groups] =
                    ["stride", "padding", "dilation", "groups"].map(|key| self.size(key));
                let options = Conv1dOptions { stride, padding: [padding; 2], dilation, groups };
                ops::conv1d(&x, weight.unwrap(), bias, &options)
            }
            operation @ ("max_pool1d" | "avg_pool1d") => {
                let [kernel, stride, padding] = ["kernel", "stride", "padding"].map(|key| self.size(key));
                let ceil_mode = self.case.flag("ceil_mode");
                let options = Pool1dOptions { stride, padding, ceil_mode, ..Pool1dOptions::new(kernel) };
                match operation {
                    "max_pool1d" => ops::max_pool1d(&x, &options),
                    _ => ops::avg_pool1d(&x, &options),
                }
            }
            other => panic!("no layer {other}"),
        }
    }
}

#[test]
fn layers() {
    assert!(check_file("layers", |run| Some(run.layer())).is_empty());
}
