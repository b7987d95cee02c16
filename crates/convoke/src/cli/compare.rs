//! `convoke compare`: separate and fused Conv+BN side by side.

use std::path::PathBuf;

use convoke::nn::modules::ConvBnMode;

use super::args::RunArgs;
use super::console::Console;
use super::train::{Session, publish};
use super::{Failure, Result, dataset};

pub(crate) fn run(args: &RunArgs) -> Result<()> {
    let console = Console::new()?;
    let data = dataset::load(args, &console)?;
    let folder = |mode: ConvBnMode| -> Option<PathBuf> {
        args.checkpoint.as_ref().map(|folder| folder.join(mode.to_string()))
    };
    // Each has a device of its own, so that their bytes are counted apart.
    let start = |mode| Session::start(args, mode, &data, folder(mode).as_deref());
    let mut sessions = [start(ConvBnMode::Separate)?, start(ConvBnMode::Fused)?];
    let mut stage = sessions[1].stage(args, &console);
    let mut interrupted = false;
    while sessions.iter().any(|session| session.has_more(args)) && !interrupted {
        for session in sessions.iter_mut().filter(|session| session.has_more(args)) {
            let report = session.step()?;
            session.show(&mut stage, &report);
        }
        interrupted = console.interrupted();
        for session in &sessions {
            session.save_if_due(interrupted)?;
        }
    }
    stage.end();
    if !interrupted {
        for session in &mut sessions {
            interrupted |= session.evaluate(&console)?.is_none();
        }
    }
    publish(args, &sessions.map(Session::finish))?;
    if interrupted { Err(Failure::Run("interrupted".into())) } else { Ok(()) }
}
