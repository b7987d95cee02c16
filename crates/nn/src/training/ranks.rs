//! A run as one of several ranks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use convoke_autograd::inference_mode;
use convoke_distributed::Communicator;
use convoke_graph::planner;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::resume::RunFiles;
use super::{Result, Trainer, TrainingConfig};
use crate::data::{DatasetInfo, Request};
use crate::data_parallel::{DataParallel, DataParallelOptions, shard_sizes, share_bytes, share_state};
use crate::difference::{self, Difference};
use crate::modules::{ConvBnMode, Keep};
use crate::planner::MemoryPlan;
use crate::{ConfigError, Init, ModuleExt, batch};

impl Trainer {
    /// Makes this run one rank of a run that all ranks of `communicator` share. Each rank calls this with a run of the same
    /// configuration and data.
    ///
    /// All ranks get rank 0's state: model, optimizer, position and random state. So only rank 0 needs to be a resumed run. Rank
    /// 0 also rehearses the coming steps on a dry device, to choose the algorithms that all ranks then use.
    ///
    /// # Errors
    /// If the ranks' configurations or data differ, or communication between ranks fails.
    pub fn join(self, communicator: &Communicator) -> Result<Trainer> {
        self.join_with_plan(communicator, None)
    }

    /// Does what [`Trainer::join`] does, and all ranks follow rank 0's `plan`; plans of other ranks are ignored. The plan is for
    /// the part of a batch that rank 0 has, which is as large as any.
    ///
    /// # Errors
    /// As [`Trainer::join`], and as [`Trainer::set_memory_plan`].
    pub fn join_with_plan(
        mut self,
        communicator: &Communicator,
        plan: Option<&MemoryPlan>,
    ) -> Result<Trainer> {
        let several = communicator.world_size() > 1;
        if several {
            self.check_same_run(communicator)?;
            self.share_run(communicator)?;
            let options = DataParallelOptions {
                gradients: self.config.send_gradients,
                ..DataParallelOptions::default()
            };
            self.parallel = DataParallel::new(self.model.as_ref(), communicator, options)?;
        }
        if let Some(plan) = plan.filter(|_| communicator.rank() == 0) {
            self.set_memory_plan(plan)?;
        }
        if !several {
            return Ok(self);
        }
        self.share_plan(communicator)?;
        self.share_choices(communicator)?;
        if self.config.sync_bn {
            self.model.convert_sync_batchnorm(Some(communicator));
        }
        Ok(self)
    }

    /// The ranks of the run.
    pub fn communicator(&self) -> &Communicator {
        self.parallel.communicator()
    }

    /// Whether any rank has the wish, for example to stop. All ranks get the same answer.
    ///
    /// # Errors
    /// If communication between ranks fails.
    pub fn agree(&self, wish: bool) -> Result<bool> {
        agree(self.communicator(), wish)
    }

    /// Compares what must be the same on all ranks for them to train one model.
    fn check_same_run(&self, communicator: &Communicator) -> Result<()> {
        let [train, test] = [&self.data.train, &self.data.test].map(|set| (set.info(), set.len()));
        let mine = SameOnAll { run: &self.config, train, test };
        let mine = serde_json::to_vec(&mine).map_err(ConfigError::Unreadable)?;
        let all = communicator.all_gather("configuration of the run", &mine)?;
        let parse = |json: &Vec<u8>| serde_json::from_slice(json);
        let all: Vec<serde_json::Value> =
            all.iter().map(parse).collect::<std::result::Result<_, _>>().map_err(ConfigError::Unreadable)?;
        for (rank, other) in all.iter().enumerate() {
            if let Some(Difference { field, values: [first, other] }) =
                difference::first([&all[0], other]).map_err(ConfigError::Unreadable)?
            {
                return Err(ConfigError::Ranks { field, first, rank, other }.into());
            }
        }
        Ok(())
    }

    /// Gives rank 0's position, optimizer and random state to all ranks. Its model follows with [`DataParallel::new`].
    fn share_run(&mut self, communicator: &Communicator) -> Result<()> {
        let RunFiles { model, optimizer, average } = self.files()?;
        let state = share_value(communicator, "state of the run", &self.state())?;
        let optimizer = share_bytes(communicator, "optimizer", optimizer)?;
        let average = average.map(|average| share_bytes(communicator, "average of the weights", average));
        let average = average.transpose()?;
        let Some(state) = state else { return Ok(()) };
        let name = |what: &str| PathBuf::from(format!("{what} of rank 0"));
        let files = RunFiles {
            model: (name("model"), model),
            optimizer: (name("optimizer"), optimizer),
            average: average.map(|average| (name("average"), average)),
        };
        self.restore((name("state"), state), files)
    }

    /// Makes the blocks of all ranks keep what rank 0's keep: in recomputation, all ranks must run the same layers in the same
    /// order. Their convolutions also get rank 0's workspace limit, which is a part of its memory plan.
    fn share_plan(&mut self, communicator: &Communicator) -> Result<()> {
        let keeps = planner::keeps(self.model.as_ref());
        let keeps = keeps.into_iter().map(|(path, keep)| (path, keep.name().to_owned())).collect();
        let plan = SharedPlan { keeps, workspace_limit: self.workspace_limit };
        let Some(plan) = share_value(communicator, "memory plan", &plan)? else { return Ok(()) };
        if self.config.conv_bn == ConvBnMode::Fused {
            let keep = |(path, name): (String, String)| Some((path, Keep::named(&name)?));
            let keeps = plan.keeps.into_iter().filter_map(keep).collect();
            planner::apply(&keeps, self.model.as_ref()).map_err(ConfigError::from)?;
        }
        // A limit that comes from no plan is the owner's of the device.
        if plan.workspace_limit != self.workspace_limit {
            self.limit_workspace(plan.workspace_limit);
        }
        Ok(())
    }

    /// Lets rank 0 choose the algorithms of the coming steps for all ranks. Only then do all ranks compute the same bits, and no
    /// rank measures while others compute.
    fn share_choices(&self, communicator: &Communicator) -> Result<()> {
        let tuner = self.device.tuner();
        if communicator.rank() == 0 {
            // An error is ignored here: the first step fails with it too, and reports it. `at_work` tells the other ranks to
            // wait, as measuring may take longer than their timeout.
            let _ = communicator.at_work(|| self.rehearse(communicator.world_size()))?;
        }
        if let Some(choices) = share_value(communicator, "choice of algorithms", &tuner.choices())? {
            tuner.adopt(self.device.compute().isa(), choices);
        }
        Ok(())
    }

    /// Runs forward and backward of a separate model on a dry device, with each number of images that ranks will have in a step,
    /// and forward with each number that they will have in evaluation.
    fn rehearse(&self, world_size: usize) -> Result<()> {
        let device = self.device.dry();
        let seen = self.config.seen(self.data.train.info())?;
        let model = self.config.build(&Init::new(&device, 0), &seen)?;
        planner::copy(self.model.as_ref(), model.as_ref()).map_err(ConfigError::from)?;
        for images in self.sampler.shard_sizes(world_size) {
            let views = self.config.augmentation.views(0, 0);
            let request = Request { samples: (0..images as u32).collect(), views: Some(views) };
            let (images, targets) = batch(&device, &self.train_loader, &request)?;
            self.loss(&self.output(model.as_ref(), &images)?, &targets)?.sum.backward()?;
        }
        model.eval();
        for images in shard_sizes(self.data.test.len(), self.evaluation_batch(), world_size) {
            let request = Request { samples: (0..images as u32).collect(), views: None };
            let (images, _) = batch(&device, &self.test_loader, &request)?;
            inference_mode(|| self.output(model.as_ref(), &images))?;
        }
        Ok(())
    }

    /// Gives the last rank's position in the random numbers to all: a rank without images may have drawn none. The last rank has
    /// images whenever any rank has.
    pub(super) fn share_random_position(&self) -> Result<()> {
        let last = self.communicator().world_size() - 1;
        let mut position = [self.random.position()];
        self.communicator().broadcast("position of random numbers", last, &mut position)?;
        self.random.set_position(position[0]);
        Ok(())
    }

    /// Gives rank 0's running statistics to all ranks: without synchronization, each rank has accumulated its own.
    pub(super) fn share_statistics(&self) -> Result<()> {
        if self.communicator().world_size() > 1 {
            share_state(self.model.as_ref(), self.communicator())?;
        }
        Ok(())
    }
}

/// Rank 0's value, on the other ranks.
fn share_value<T: Serialize + DeserializeOwned>(
    communicator: &Communicator,
    name: &str,
    own: &T,
) -> Result<Option<T>> {
    let bytes = serde_json::to_vec(own).map_err(ConfigError::Unreadable)?;
    let bytes = share_bytes(communicator, name, bytes)?;
    let theirs = (communicator.rank() > 0).then(|| serde_json::from_slice(&bytes));
    Ok(theirs.transpose().map_err(ConfigError::Unreadable)?)
}

/// Whether any rank has the wish.
pub(super) fn agree(ranks: &Communicator, wish: bool) -> Result<bool> {
    if ranks.world_size() == 1 {
        return Ok(wish);
    }
    let wishes = ranks.all_gather("wish", &[u8::from(wish)])?;
    Ok(wishes.into_iter().flatten().any(|wish| wish != 0))
}

/// What rank 0 tells the others of its memory plan.
#[derive(Serialize, Deserialize)]
struct SharedPlan {
    /// The name of what each block keeps, by the block's path.
    keeps: BTreeMap<String, String>,
    workspace_limit: Option<usize>,
}

/// What ranks compare before they train together.
#[derive(Serialize)]
struct SameOnAll<'a> {
    run: &'a TrainingConfig,
    /// The description of the images, and their number.
    train: (&'a DatasetInfo, usize),
    test: (&'a DatasetInfo, usize),
}
