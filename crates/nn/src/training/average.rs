//! The exponential moving average of a run's weights.

use std::sync::{Mutex, MutexGuard, PoisonError};

use convoke_autograd::Tensor;
use convoke_kernels::optimizer::moving_average;

use super::{Result, Trainer};
use crate::checkpoint::{self, Value};
use crate::{Buffer, Module, ModuleExt, Parameter, State};

/// The average of a model's parameters and buffers over the steps of a run: average = d * average + (1 - d) * value after each
/// step, with d = min(decay, (1 + t) / (10 + t)) after step t, from 1, so that the first values are soon forgotten.
pub(super) struct Average {
    decay: f64,
    own: Vec<Averaged>,
    /// The average of each, or the model's value while [`Trainer::swap_average`] has exchanged them.
    values: Mutex<Vec<Tensor>>,
}

/// What is averaged.
struct Averaged {
    tensor: Own,
    /// The place of the tensor among what a checkpoint saves; a tied parameter has several, and this is the first.
    place: usize,
}

enum Own {
    Parameter(Parameter),
    Buffer(Buffer),
}

impl Own {
    fn of(state: State) -> Option<Own> {
        match state {
            State::Parameter(parameter) => Some(Own::Parameter(parameter)),
            State::Buffer(buffer) => Some(Own::Buffer(buffer)),
            State::Counter(_) => None,
        }
    }

    fn is(&self, other: &Own) -> bool {
        match (self, other) {
            (Own::Parameter(own), Own::Parameter(other)) => own.is(other),
            (Own::Buffer(own), Own::Buffer(other)) => own.is(other),
            _ => false,
        }
    }

    fn value(&self) -> Tensor {
        match self {
            Own::Parameter(parameter) => parameter.value(),
            Own::Buffer(buffer) => buffer.value(),
        }
    }

    fn set(&self, value: &Tensor) -> convoke_autograd::Result<()> {
        match self {
            Own::Parameter(parameter) => parameter.set(value),
            Own::Buffer(buffer) => buffer.set(value),
        }
    }

    /// Whether it stays what it is.
    fn is_frozen(&self) -> bool {
        matches!(self, Own::Parameter(parameter) if !parameter.is_trained())
    }
}

impl Averaged {
    /// Whether the average is the value itself.
    fn is_value(&self, value: &Tensor) -> bool {
        self.tensor.is_frozen() || !value.dtype().computes()
    }

    /// The value, in memory of its own if it will be averaged.
    fn copy(&self) -> convoke_autograd::Result<Tensor> {
        let value = self.tensor.value();
        if self.is_value(&value) {
            return Ok(value.detach());
        }
        let of = (value.device(), value.dtype());
        Tensor::written_elements(of, value.shape(), value.format(), |copy| {
            Ok(copy.copy_from(value.elements()?)?)
        })
    }

    fn move_average(&self, average: &mut Tensor, decay: f64) -> convoke_autograd::Result<()> {
        let value = self.tensor.value();
        if self.is_value(&value) {
            *average = value.detach();
            return Ok(());
        }
        let cpu = value.device().compute();
        average.update_elements(|average| Ok(moving_average(cpu, decay, average, value.elements()?)?))
    }
}

impl Average {
    /// The average of a model before the first step.
    pub(super) fn new(model: &dyn Module, decay: f64) -> Result<Average> {
        let mut own: Vec<Averaged> = Vec::new();
        for (place, (_, state)) in model.named_state().into_iter().enumerate() {
            if let Some(tensor) = Own::of(state)
                && !own.iter().any(|known| known.tensor.is(&tensor))
            {
                own.push(Averaged { tensor, place });
            }
        }
        let values = own.iter().map(Averaged::copy).collect::<convoke_autograd::Result<_>>()?;
        Ok(Average { decay, own, values: Mutex::new(values) })
    }

    /// Takes the model's values after step `step`, from 1, into the average.
    pub(super) fn update(&self, step: u64) -> Result<()> {
        let decay = self.decay.min((1.0 + step as f64) / (10.0 + step as f64));
        for (own, average) in self.own.iter().zip(&mut *self.values()) {
            own.move_average(average, decay)?;
        }
        Ok(())
    }

    /// Exchanges the model's values with the averages.
    fn swap(&self) -> Result<()> {
        for (own, average) in self.own.iter().zip(&mut *self.values()) {
            let value = own.tensor.value().detach();
            own.tensor.set(&std::mem::replace(average, value))?;
        }
        Ok(())
    }

    /// Continues from the values of another run's average, in the order of what a checkpoint saves.
    pub(super) fn restore(&self, saved: &[Value]) {
        for (own, average) in self.own.iter().zip(&mut *self.values()) {
            if let Some(Value::Tensor(tensor)) = saved.get(own.place) {
                *average = tensor.detach();
            }
        }
    }

    fn values(&self) -> MutexGuard<'_, Vec<Tensor>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Trainer {
    /// Exchanges the model's parameters and buffers with their moving averages; a second call exchanges them back. Without
    /// [`TrainingConfig::ema`](super::TrainingConfig::ema), nothing happens.
    pub(super) fn swap_average(&self) -> Result<()> {
        self.average.as_ref().map_or(Ok(()), Average::swap)
    }

    /// Runs `work` while the model has the moving averages of its weights. Without
    /// [`TrainingConfig::ema`](super::TrainingConfig::ema), it has the weights themselves.
    ///
    /// # Errors
    /// If the weights cannot be exchanged.
    pub fn with_averaged_weights<R>(&self, work: impl FnOnce(&dyn Module) -> R) -> Result<R> {
        self.swap_average()?;
        let result = work(self.model());
        self.swap_average()?;
        Ok(result)
    }

    /// The averages as the file of a checkpoint, with the names and counters of the model's; `None` if the run keeps none.
    pub(super) fn average_file(&self) -> Result<Option<Vec<u8>>> {
        if self.average.is_none() {
            return Ok(None);
        }
        let file = |model: &dyn Module| checkpoint::to_safetensors(&checkpoint::model_values(model));
        Ok(Some(self.with_averaged_weights(file)??))
    }
}
