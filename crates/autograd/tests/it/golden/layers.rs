//! The layers of `layers.safetensors`.

use super::{Run, check_file};
use convoke_autograd::ops::{
    self, Conv1dOptions, ConvTransposeOptions, Coordinates, GroupNormOptions, LayerNormOptions,
    LayerNormOver, LocalResponse, Padding, Pool1dOptions, PoolOptions, ResizeMode, ResizeOptions, ResizeTo,
    Rounding,
};
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

    fn windows(&self) -> PoolOptions {
        let &[top, bottom, left, right] = &self.case.sizes("padding")[..] else { panic!("four sides") };
        let (kernel, stride) = (self.size("kernel"), self.size("stride"));
        let flag = |key: &str| self.case.attribute(key).is_some() && self.case.flag(key);
        PoolOptions {
            stride: [stride; 2],
            padding: [top, left],
            padding_after: Some([bottom, right]),
            ceil_mode: flag("ceil_mode"),
            count_include_pad: flag("count_include_pad"),
            divisor_override: self.case.attribute("divisor_override").map(|_| self.size("divisor_override")),
            ..PoolOptions::new(kernel)
        }
    }

    fn resize(&self) -> ResizeOptions {
        let to = match self.case.attribute("size") {
            Some(_) => ResizeTo::Size(self.pair("size")),
            None => ResizeTo::Scale(self.case.numbers("scale").try_into().expect("height and width")),
        };
        match self.case.text("mode") {
            "nearest" => ResizeOptions::nearest(to),
            "bilinear" => ResizeOptions::bilinear(to, self.case.flag("align_corners")),
            _ => ResizeOptions {
                to,
                mode: ResizeMode::Nearest(Rounding::RoundPreferCeil),
                coordinates: Coordinates::HalfPixel,
            },
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
            "adaptive_avg_pool2d" => ops::adaptive_avg_pool2d(&x, self.pair("size")),
            "adaptive_max_pool2d" => ops::adaptive_max_pool2d(&x, self.pair("size")),
            "avg_pool2d" => ops::avg_pool2d(&x, &self.windows()),
            "max_pool2d" => ops::max_pool2d(&x, &self.windows()),
            "resize2d" => ops::resize2d(&x, &self.resize()),
            "group_norm" => {
                let options = GroupNormOptions { groups: self.size("groups"), eps: self.case.number("eps") };
                ops::group_norm(&x, weight, bias, &options)
            }
            "instance_norm" => ops::instance_norm(&x, weight, bias, self.case.number("eps")),
            "layer_norm" => {
                let over = match self.size("axes") {
                    0 => LayerNormOver::Channels,
                    axes => LayerNormOver::Last(axes),
                };
                let options = LayerNormOptions { over, eps: self.case.number("eps") };
                ops::layer_norm(&x, weight, bias, &options)
            }
            "local_response_norm" => {
                let [alpha, beta, k] = ["alpha", "beta", "k"].map(|key| self.case.number(key));
                ops::local_response_norm(&x, &LocalResponse { size: self.size("size"), alpha, beta, k })
            }
            other => panic!("no layer {other}"),
        }
    }
}

#[test]
fn layers() {
    assert!(check_file("layers", |run| Some(run.layer())).is_empty());
}
