//! Traces: what is noted, where tensors come from, and that nothing is noted outside.

use std::panic::{AssertUnwindSafe, catch_unwind};

use convoke_autograd::{
    Function, MemoryFormat, Needs, Operation, Result, Source, Tensor, apply, no_grad, note_dropout, trace,
};

use crate::common::{device, normal, values};

/// (a b) by itself, or of other operations.
struct Product {
    composes: bool,
}

impl Function for Product {
    type Saved = ();

    fn name(&self) -> &'static str {
        "product"
    }

    fn compose(&self, inputs: &[&Tensor]) -> Result<Option<Tensor>> {
        self.composes.then(|| inputs[0].mul(inputs[1])).transpose()
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        let product: Vec<f64> =
            values::<f64>(inputs[0]).iter().zip(values::<f64>(inputs[1])).map(|(a, b)| a * b).collect();
        Ok((Tensor::from_slice(inputs[0].device(), inputs[0].shape(), &product)?, ()))
    }

    fn backward(&self, (): (), _: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![None, None])
    }
}

/// Runs other operations in forward.
struct Outer;

impl Function for Outer {
    type Saved = ();

    fn name(&self) -> &'static str {
        "outer"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        Ok((inputs[0].relu()?.scale(2.0)?, ()))
    }

    fn backward(&self, (): (), _: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![None])
    }
}

#[test]
fn tensors_come_from_where_they_were_made() {
    let device = device();
    let x = normal::<f64>(&device, 1, &[2, 2, 2, 2]);
    // Two parameters that still share their elements.
    let (a, b) = (x.with_grad(), x.with_grad());
    let (result, traced) = trace(|| -> Result<[Tensor; 2]> {
        let y = a.to_format(MemoryFormat::ChannelsLast)?;
        let turned = y.permute(&[0, 2, 3, 1])?;
        let z = turned.add(&b)?;
        Ok([z.mul(&a.detach())?, apply(Outer, &[&z])?])
    });
    let [product, outer] = result.unwrap();
    let names: Vec<&str> = traced.calls.iter().map(|call| call.name).collect();
    assert_eq!(names, ["to_format", "permute", "add", "mul", "relu", "scale", "outer"]);
    let inputs: Vec<&[Source]> = traced.calls.iter().map(|call| &call.inputs[..]).collect();
    let [first, second] = [Source::Outside(0), Source::Outside(1)];
    assert_eq!(inputs[0], [first]);
    // The turned tensor shares its elements with y, but is another one.
    assert_eq!(inputs[1..3], [&[Source::Call(0)][..], &[Source::Call(1), second]]);
    assert!(traced.tensor(inputs[3][1]).is_same(&a) && inputs[3][0] == Source::Call(2));
    // The output of a function that is made of others is that of the last of these.
    assert_eq!(inputs[4..], [&[Source::Call(2)][..], &[Source::Call(4)], &[Source::Call(2)]]);
    assert_eq!(
        [&product, &outer].map(|output| traced.source(output)),
        [Some(Source::Call(3)), Some(Source::Call(5))]
    );
    assert_eq!(traced.source(&x.scale(1.0).unwrap()), None);
}

#[test]
fn traces_nest_and_end() {
    let x = normal::<f64>(&device(), 2, &[3]);
    let (inner, outer) = trace(|| {
        x.relu().unwrap();
        let ((), inner) = trace(|| drop(no_grad(|| x.sigmoid())));
        assert!(catch_unwind(AssertUnwindSafe(|| trace(|| -> u8 { panic!("within") }))).is_err());
        x.tanh().unwrap();
        inner
    });
    let names =
        |trace: &convoke_autograd::Trace| trace.calls.iter().map(|call| call.name).collect::<Vec<_>>();
    assert_eq!((names(&inner), names(&outer)), (vec!["sigmoid"], vec!["relu", "tanh"]));
    x.relu().unwrap();
    assert!(trace(|| ()).1.calls.is_empty());
}

#[test]
fn own_functions_compose_themselves_where_they_are_traced() {
    let device = device();
    let (a, b) = (normal::<f64>(&device, 3, &[4]), normal::<f64>(&device, 4, &[4]));
    for composes in [false, true] {
        let (y, traced) = trace(|| apply(Product { composes }, &[&a, &b]).unwrap());
        let source = traced.source(&y).unwrap();
        let Source::Call(call) = source else { panic!("{source:?}") };
        assert_eq!(traced.calls[call].operation.is_some(), composes);
        assert_eq!(values::<f64>(&y), values::<f64>(&a.mul(&b).unwrap()));
    }
}

#[test]
fn dropouts_that_drop_nothing_are_noted() {
    let x = normal::<f64>(&device(), 5, &[4]).with_grad();
    assert!(note_dropout(&x, 0.3).unwrap().is(&x));
    let (y, traced) = trace(|| note_dropout(&x, 0.3).unwrap());
    assert!(matches!(traced.calls[0].operation, Some(Operation::Dropout(p)) if p == 0.3));
    assert!(!y.is_same(&x) && values::<f64>(&y) == values::<f64>(&x));
    assert_eq!(values::<f64>(y.sum().unwrap().backward().unwrap().get(&x).unwrap()), [1.0; 4]);
}
