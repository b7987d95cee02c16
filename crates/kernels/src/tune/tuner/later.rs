//! Measuring, when there is time, what was chosen by estimate for want of it.

use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Tuner;
use crate::tune::contest::Subject;
use crate::tune::waiting::{Operation, Waiting};
use crate::tune::{Event, Tuning};

impl Tuner {
    /// Measures one of the choices that were made by estimate because `total_budget` was spent, stores the result in the cache if
    /// there is one, and uses it from now on, as [`Tuner::tune`] does. So a program can give no budget, begin without waiting, and
    /// measure between its steps, while none of its threads computes.
    ///
    /// It takes the choice whose uses took the most time so far, by estimate, among those asked for at least `at_least_uses` times
    /// whose uses took `at_least` in all; a [`Cpu::dry`](crate::Cpu::dry) does not count. One takes about `budget`. Where another process has stored a result in the
    /// meantime, that is used, and the next choice is taken.
    ///
    /// `None` means that nothing was measured: no such choice waits, another thread is using the tuner, or there is no memory to
    /// measure or no algorithm that is right. A choice that cannot be measured stays as it is and waits no longer; the observer is
    /// told of it by an [`Event::Warning`].
    pub fn measure_next(&self, at_least_uses: u64, at_least: Duration) -> Option<Tuning> {
        if self.pending() == 0 {
            return None;
        }
        let mut known = match self.inner.known.try_lock() {
            Ok(known) => known,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        loop {
            let waiting = known.waiting.take(at_least_uses, at_least.as_secs_f64())?;
            let Waiting { operation, cpu, limited, .. } = &waiting;
            let subject: Box<dyn Subject> = match operation {
                Operation::Conv(problem, pass) => Box::new(self.subject(&known, problem, *pass, cpu)),
                Operation::MaxPool(problem, dtype, pass) => {
                    Box::new(self.max_pool_subject(problem, *dtype, *pass, cpu))
                }
            };
            let stored = self.stored(&mut known, subject.contest());
            let measured = stored.is_none();
            let tuning = match stored {
                Some(tuning) => {
                    self.settle(&mut known, subject.contest(), &tuning);
                    tuning
                }
                None => match self.remeasure(&mut known, subject.as_ref(), &mut |_| ()) {
                    Ok(tuning) => tuning,
                    Err(error) => {
                        self.tell(&Event::Warning(error.to_string()));
                        return None;
                    }
                },
            };
            if let Operation::Conv(problem, pass) = operation {
                known.forget_plans(problem, *pass);
            }
            if known.workspace_limit.is_some() && !limited {
                known.waiting.put_aside(waiting);
            }
            if measured {
                return Some(tuning);
            }
        }
    }

    /// How many choices wait for [`Tuner::measure_next`], whatever their uses. At most 4096 do; one more takes the place of the
    /// oldest. It never waits for another thread.
    pub fn pending(&self) -> usize {
        self.inner.pending.load(Ordering::Relaxed)
    }
}
