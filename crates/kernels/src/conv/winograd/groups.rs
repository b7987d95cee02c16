//! A convolution with groups as one convolution per group: threads share the groups, or each group's work.

use crate::Cpu;
use crate::conv::plan::TypedKernel;
use crate::conv::problem::ConvProblem;
use crate::conv::workspace::{LINE, aligned};
use crate::shared::Shared;

/// The convolution of any one group: groups differ only in where their channels lie.
pub(super) trait GroupKernel: Send + Sync {
    /// Floats of workspace.
    fn workspace_len(&self) -> usize;

    /// Computes a group's part of `output` with the threads that the kernel was made for; `workspace` starts on a cache
    /// line and is as long as asked for.
    fn run(
        &self,
        cpu: &Cpu,
        group: usize,
        inputs: [&[f32]; 2],
        output: Shared<'_, f32>,
        workspace: &mut [f32],
    );
}

/// All groups of a problem.
pub(super) struct Groups<K> {
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
        Groups { kernel: kernel(&cpu), groups: problem.groups, cpu, teams, work: problem.flops() as usize }
    }

    /// Floats of a team's workspace, in whole cache lines.
    fn team_len(&self) -> usize {
        self.kernel.workspace_len().next_multiple_of(LINE)
    }

    pub(super) fn workspace_len(&self) -> usize {
        LINE + self.teams * self.team_len()
    }
}

impl<K: GroupKernel> TypedKernel<f32> for Groups<K> {
    fn run(&self, cpu: &Cpu, inputs: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let (output, workspace) = (Shared::new(output), aligned(workspace));
        let len = self.kernel.workspace_len();
        if self.teams == 1 {
            // A plan may be run on the calling thread alone: `cpu` says so.
            for group in 0..self.groups {
                self.kernel.run(cpu, group, inputs, output, &mut workspace[..len]);
            }
            return;
        }
        let teams = workspace.chunks_mut(self.team_len());
        cpu.for_each_with(self.work, teams, 0..self.groups, |workspace, group| {
            self.kernel.run(&self.cpu, group, inputs, output, &mut workspace[..len]);
        });
    }
}
