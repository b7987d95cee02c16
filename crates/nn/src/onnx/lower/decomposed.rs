//! Operations that are several nodes, in all versions or in older ones.

use convoke_autograd::ops::Pointwise;

use super::{Lowered, Lowering, NodeProto, input};
use crate::graph::{Array, Data, Kind, Node};
use crate::onnx::build::number;

/// From here on softplus is its argument, up to rounding in single precision: e^-20 is 2e-9.
const NO_THRESHOLD: f64 = 20.0;

impl Lowering<'_> {
    pub(super) fn pointwise(&mut self, node: &Node, function: Pointwise) -> Lowered {
        let plain = NodeProto::new(node.op.name());
        let opset = self.opset;
        let x = input(node, 0);
        let proto = match function {
            Pointwise::Silu if opset < 24 => {
                let gate = self.before(node, ("gate", NodeProto::new("Sigmoid")), &[x]);
                return self.product(node, [x, &gate]);
            }
            Pointwise::HardSwish if opset < 14 => {
                let gate = NodeProto::new("HardSigmoid").float("alpha", 1.0 / 6.0).float("beta", 0.5);
                let gate = self.before(node, ("gate", gate), &[x]);
                return self.product(node, [x, &gate]);
            }
            Pointwise::Mish if opset < 18 => {
                let soft = self.before(node, ("softplus", NodeProto::new("Softplus")), &[x]);
                let gate = self.before(node, ("gate", NodeProto::new("Tanh")), &[&soft]);
                return self.product(node, [x, &gate]);
            }
            Pointwise::Gelu | Pointwise::GeluTanh if opset < 20 => return self.gelu(node, function),
            Pointwise::GeluTanh => plain.text("approximate", "tanh"),
            Pointwise::LeakyRelu { slope } => plain.float("alpha", slope),
            Pointwise::HardSigmoid { alpha, beta } => plain.float("alpha", alpha).float("beta", beta),
            Pointwise::Elu { alpha } | Pointwise::Celu { alpha } => plain.float("alpha", alpha),
            Pointwise::Clip { min, max } => {
                let mut inputs = vec![x.to_owned()];
                for (what, bound) in [("min", min), ("max", max)] {
                    inputs.push(match bound.is_finite() {
                        true => self.number(node, what, bound)?,
                        false => String::new(),
                    });
                }
                return self.emit_with(node, plain, inputs);
            }
            Pointwise::Softplus { beta, threshold } if beta != 1.0 || threshold < NO_THRESHOLD => {
                return self.softplus(node, beta, threshold);
            }
            _ => plain,
        };
        self.emit(node, proto)
    }

    /// softplus(beta x) / beta, and x where beta x is above the threshold, which ONNX does not have.
    fn softplus(&mut self, node: &Node, beta: f64, threshold: f64) -> Lowered {
        let x = input(node, 0);
        let beta = self.number(node, "beta", beta)?;
        let scaled = self.before(node, ("scaled", NodeProto::new("Mul")), &[x, &beta]);
        let soft = self.before(node, ("softplus", NodeProto::new("Softplus")), &[&scaled]);
        if threshold >= NO_THRESHOLD {
            return self.emit_with(node, NodeProto::new("Div"), vec![soft, beta]);
        }
        let soft = self.before(node, ("unscaled", NodeProto::new("Div")), &[&soft, &beta]);
        let threshold = self.number(node, "threshold", threshold)?;
        let above = self.before(node, ("above", NodeProto::new("Greater")), &[&scaled, &threshold]);
        self.emit_with(node, NodeProto::new("Where"), vec![above, x.to_owned(), soft])
    }

    /// The product of two values as the node itself.
    fn product(&mut self, node: &Node, factors: [&str; 2]) -> Lowered {
        self.emit_with(node, NodeProto::new("Mul"), factors.map(str::to_owned).to_vec())
    }

    /// x (1 + erf(x / sqrt(2))) / 2, or x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
    fn gelu(&mut self, node: &Node, function: Pointwise) -> Lowered {
        use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
        let x = input(node, 0);
        let op = |name: &'static str| (name, NodeProto::new(name));
        let signed = if function == Pointwise::Gelu {
            let factor = self.number(node, "factor", FRAC_1_SQRT_2)?;
            let scaled = self.before(node, op("Mul"), &[x, &factor]);
            self.before(node, op("Erf"), &[&scaled])
        } else {
            let three = self.number(node, "three", 3.0)?;
            let cube = self.before(node, op("Pow"), &[x, &three]);
            let factor = self.number(node, "factor", 0.044715)?;
            let term = self.before(node, op("Mul"), &[&cube, &factor]);
            let sum = self.before(node, op("Add"), &[x, &term]);
            let outer = self.number(node, "outer", FRAC_2_SQRT_PI * FRAC_1_SQRT_2)?;
            let scaled = self.before(node, op("Mul"), &[&sum, &outer]);
            self.before(node, op("Tanh"), &[&scaled])
        };
        let one = self.number(node, "one", 1.0)?;
        let positive = self.before(node, op("Add"), &[&signed, &one]);
        let half = self.number(node, "half", 0.5)?;
        let share = self.before(node, op("Mul"), &[&positive, &half]);
        self.product(node, [x, &share])
    }

    /// Groups are instances of an instance norm; scale and bias of channels come after it.
    pub(super) fn group_norm(&mut self, node: &Node, groups: usize, eps: f64) -> Lowered {
        let [x, scale, bias] = [0, 1, 2].map(|place| input(node, place));
        let channels = self.arrays.get(scale).map(|scale| scale.len());
        let channels =
            channels.ok_or("its number of channels is not known, so it needs at least version 21")?;
        let fill = |value: f64| match self.kind(x) {
            Kind::F64 => Data::F64(vec![value; groups]),
            _ => Data::F32(vec![value as f32; groups]),
        };
        let (ones, zeros) = (Array::list(fill(1.0)), Array::list(fill(0.0)));
        let sizes = Array::integers([0, number(groups), -1]);
        let sizes = self.array(node, "groups", &sizes)?;
        let (ones, zeros) = (self.array(node, "ones", &ones)?, self.array(node, "zeros", &zeros)?);
        let grouped = self.before(node, ("grouped", NodeProto::new("Reshape")), &[x, &sizes]);
        let norm = NodeProto::new("InstanceNormalization").float("epsilon", eps);
        let normed = self.before(node, ("normed", norm), &[&grouped, &ones, &zeros]);
        let sizes = self.array(node, "channels", &Array::integers([0, number(channels), -1]))?;
        let by_channel = self.before(node, ("by_channel", NodeProto::new("Reshape")), &[&normed, &sizes]);
        let axis = self.array(node, "axis", &Array::integers([1]))?;
        let scale = self.before(node, ("scale", NodeProto::new("Unsqueeze")), &[scale, &axis]);
        let scaled = self.before(node, ("scaled", NodeProto::new("Mul")), &[&by_channel, &scale]);
        let bias = self.before(node, ("bias", NodeProto::new("Unsqueeze")), &[bias, &axis]);
        let moved = self.before(node, ("moved", NodeProto::new("Add")), &[&scaled, &bias]);
        let shape = self.before(node, ("shape", NodeProto::new("Shape")), &[x]);
        self.emit_with(node, NodeProto::new("Reshape"), vec![moved, shape])
    }
}
