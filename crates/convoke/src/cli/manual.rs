//! `convoke completions` and `convoke man`: what shells and `man` know of the commands.

use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;

use super::failure::{Failure, Result};
use super::{console, output};

#[derive(Args)]
pub(crate) struct CompletionsArgs {
    /// The shell that reads them.
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Args)]
pub(crate) struct ManArgs {
    /// Where the pages go: a folder of `man1` of MANPATH, such as ~/.local/share/man/man1.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Prints the completions of a program's commands.
pub(crate) fn completions(args: &CompletionsArgs, mut command: Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, program(), &mut script);
    console::print_exactly(&String::from_utf8_lossy(&script))
}

/// Writes a page for the program and one for each of its commands.
pub(crate) fn man(args: &ManArgs, command: Command) -> Result<()> {
    output::check_folder("DIR", &args.folder)?;
    let mut command = command.name(program()).disable_help_subcommand(true);
    command.build();
    console::note(&format!("{} pages", write_pages(&command, &args.folder)?));
    output::announce("man", &args.folder);
    Ok(())
}

/// Writes the pages of a command and of those below it, and tells how many.
fn write_pages(command: &Command, folder: &Path) -> Result<usize> {
    let mut pages = 1;
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        pages += write_pages(below, folder)?;
    }
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone())
        .render(&mut page)
        .map_err(|error| Failure::Run(format!("cannot make the page of {name}: {error}")))?;
    output::write_silently("DIR", &folder.join(format!("{name}.1")), &page)?;
    Ok(pages)
}

/// The name that this program was started by: users' own programs have the same commands.
fn program() -> String {
    let path = std::env::args_os().next().map(PathBuf::from);
    let name = path.as_deref().and_then(Path::file_stem).map(|name| name.to_string_lossy().into_owned());
    name.filter(|name| !name.is_empty()).unwrap_or_else(|| "convoke".into())
}
