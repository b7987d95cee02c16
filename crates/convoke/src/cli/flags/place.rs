//! What DATA on the command line stands for: a folder, whose kind is seen by what is in it, or a data set by name.

use std::fs;
use std::path::{Path, PathBuf};

use convoke_files::escaped;

use crate::cli::failure::{Failure, Result};
use crate::cli::registry::{Data, datasets};
use crate::cli::text;
use crate::nn::data::DatasetSpec;

/// The data set of any folder that holds no other one.
const FOLDER: &str = "folder";

/// What DATA stands for.
pub(crate) struct Place {
    pub(crate) data: Data,
    /// The folder of its files, if DATA is one.
    pub(crate) folder: Option<PathBuf>,
}

impl Place {
    /// Finds out what `argument` stands for. A name is a data set, also where a folder is called so; then the folder holds its files if
    /// they are there.
    ///
    /// # Errors
    /// If it is neither a data set nor a folder; the error proposes what is called alike.
    pub(crate) fn of(argument: &Path) -> Result<Place> {
        let here = || Some(argument.to_owned());
        if let Some(data) = argument.to_str().and_then(Data::named) {
            let is_here = matches!(data, Data::Named(spec) if spec.has_files() && spec.is_present(argument));
            // The current folder may hold a folder of photographs that is called "folder".
            let is_kind = matches!(data, Data::Named(spec) if spec.takes_photos());
            if !is_kind || !argument.is_dir() {
                return Ok(Place { data, folder: is_here.then(here).flatten() });
            }
        }
        match fs::metadata(argument) {
            Ok(found) if found.is_dir() => Ok(Place { data: Data::Named(kind(argument)), folder: here() }),
            Ok(_) => Err(Failure::Usage(format!(
                "{} is a file: DATA is a folder of photographs, or a data set by name",
                escaped(argument.display())
            ))),
            Err(_) => Err(unknown(argument)),
        }
    }
}

/// The data set whose files a folder holds: photographs in folders of classes, if no other one.
fn kind(folder: &Path) -> &'static DatasetSpec {
    let found = datasets().iter().find(|spec| spec.name() != FOLDER && spec.is_present(folder));
    found.unwrap_or_else(|| datasets().get(FOLDER).expect("it is built in"))
}

/// The error for what is neither a folder nor a data set.
fn unknown(argument: &Path) -> Failure {
    let names: Vec<&str> =
        datasets().names().filter(|name| Data::named(name).is_some_and(Data::is_set)).collect();
    let proposal = nearest(argument, &names)
        .map_or_else(String::new, |name| format!("; did you mean {}?", escaped(name)));
    Failure::Usage(format!(
        "no folder is called {}{proposal}\nDATA is a folder of photographs, or one of the data sets {}",
        escaped(argument.display()),
        names.join(", ")
    ))
}

/// What is called most alike: a folder beside it, or a data set.
fn nearest(argument: &Path, names: &[&str]) -> Option<String> {
    let wanted = argument.file_name()?.to_str()?;
    let parent = argument.parent().unwrap_or(Path::new(""));
    let listed = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let folders = fs::read_dir(listed).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    let folders = folders.filter_map(|entry| Some((entry.file_name().to_str()?.to_owned(), true)));
    let names = names.iter().map(|name| ((*name).to_owned(), false));
    let (name, is_folder) = text::nearest(wanted, folders.chain(names))?;
    Some(if is_folder { parent.join(name).display().to_string() } else { name })
}
