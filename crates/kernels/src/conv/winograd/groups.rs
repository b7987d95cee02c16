//! A convolution with groups as one convolution per group: threads share the groups, or each group's work.

use crate::conv::plan::ConvKernel;
use crate::conv::problem::{ConvProblem, ConvTypes};
use crate::conv::workspace::{LINE, aligned};
use crate::shared::Shared;
use crate::{Cpu, Result, Slice, SliceMut, Stored};

/// The convolution of any one group: groups differ only in where their channels lie.
pub(super) trait GroupKernel: Send + Sync {
    /// The types of the two inputs' numbers, and of the output's.
    type First: Stored;
    type Second: Stored;
    type Output: Stored;

    /// Floats of workspace.
    fn workspace_len(&self) -> usize;

    /// Computes a group's part of `output` with the threads that the kernel was made for; `workspace` starts on a cache
    /// line and is as long as asked for.
    fn run(
        &self,
        cpu: &Cpu,
        group: usize,
        inputs: (&[Self::First], &[Self::Second]),
        output: Shared<'_, Self::Output>,
        workspace: &mut [f32],
    );
}

/// All groups of a problem.
pub(super) struct Groups<K> {
    types: ConvTypes,
    kernel: K,
    groups: usize,
    /// The threads that work on one group, and the number of such teams.
    cpu: Cpu,
    teams: usize,
    work: usize,
}

impl<K: GroupKernel> Groups<K> {
    pub(super) fn new(problem: &ConvProblem, cpu: &Cpu, kernel: impl FnOnce(&Cpu) -> K) -> Self {
        let alone = problem.groups >= cpu.threads();
        let teams = if alone { cpu.threads() } else { 1 };
        let cpu = if alone { cpu.one_thread() } else { cpu.clone() };
        let (types, work) = (problem.types, problem.flops() as usize);
        Groups { types, kernel: kernel(&cpu), groups: problem.groups, cpu, teams, work }
    }

    /// Floats of a team's workspace, in whole cache lines.
    fn team_len(&self) -> usize {
        self.kernel.workspace_len().next_multiple_of(LINE)
    }

    pub(super) fn workspace_len(&self) -> usize {
        LINE + self.teams * self.team_len()
    }
}

impl<K: GroupKernel> ConvKernel for Groups<K> {
    fn types(&self) -> ConvTypes {
        self.types
    }

    fn run(
        &self,
        cpu: &Cpu,
        [a, b]: [Slice<'_>; 2],
        output: SliceMut<'_>,
        workspace: SliceMut<'_>,
    ) -> Result<()> {
        let inputs = (a.of()?, b.of()?);
        let (output, workspace) = (Shared::new(output.of()?), aligned(workspace.of()?));
        let len = self.kernel.workspace_len();
        if self.teams == 1 {
            // A plan may be run on the calling thread alone: `cpu` says so.
            for group in 0..self.groups {
                self.kernel.run(cpu, group, inputs, output, &mut workspace[..len]);
            }
            return Ok(());
        }
        let teams = workspace.chunks_mut(self.team_len());
        cpu.for_each_with(self.work, teams, 0..self.groups, |workspace, group| {
            self.kernel.run(&self.cpu, group, inputs, output, &mut workspace[..len]);
        });
        Ok(())
    }
}
