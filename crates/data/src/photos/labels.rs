//! Photographs with labels, numbers or a class, which a table gives. `label_folders` finds labels that are folders.
//!
//! ```text
//! DIR/labels.csv          DIR/IMAGE or DIR/images/IMAGE
//! DIR/train/labels.csv    DIR/val/labels.csv    DIR/test/labels.csv
//! ```
//! The first line of a table names its columns, which commas, semicolons or tabs separate. The first column names the images' files, with
//! or without their ending. A column `split` (or `part`) tells which part an image is of: train, val, test. Without it, a share is for
//! validation. The other columns are of one of these kinds:
//!
//! - **Labels**: columns of 0 and 1, one for each label. Or one column of names that `|` or `;` separates, called `labels` or `tags` where
//!   no image has two.
//! - **Numbers**: columns of numbers, to be predicted.
//! - **A class**: one column of names; or of numbers, if it is called `class`, `label` or `category`.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Component, Path, PathBuf};

use convoke_files::read_text;

use super::super::progress::report;
use super::super::threads::threads;
use super::super::{
    DataError, DatasetInfo, MAX_CLASSES, Progress, ProgressEvent, ProgressUnit, Targets, TrainTest,
    ValueScale,
};
use super::folder::{File, FileTarget, FolderOptions, PhotoFolder, Set, info_of, open, split};
use super::label_folders;
use super::layout::{PARTS, PhotoPart, TEST, TRAIN, VALIDATION, names_of};
use super::listing::{EXTENSIONS, check_within, has_extension, joined};
use super::measure::{MeanAndStd, Skipped, sound};

const NAME: &str = "labels";
const TABLE: &str = "labels.csv";
const IMAGES: &str = "images";
/// Larger tables are refused: one of a million images has about 50 MB.
const LARGEST: u64 = 1 << 28;
/// Names of the column that tells the part of an image.
const PART: [&str; 2] = ["split", "part"];
/// Names of a column of classes, whatever they look like.
const CLASS: [&str; 3] = ["class", "label", "category"];
/// Names of a column of any number of names, even if no image has two.
const TAGS: [&str; 2] = ["labels", "tags"];
/// What separates these names.
const SEPARATORS: [char; 2] = ['|', ';'];
const ROWS_PER_REPORT: u64 = 1000;

/// Whether a folder tells the labels of images, by a table or by folders, or its training part does.
pub(super) fn has_labels(folder: &Path) -> bool {
    has_table(folder) || has_folders(folder)
}

fn has_table(folder: &Path) -> bool {
    folder.join(TABLE).is_file() || folder.join(TRAIN).join(TABLE).is_file()
}

fn has_folders(folder: &Path) -> bool {
    label_folders::are_at(folder) || label_folders::are_at(&folder.join(TRAIN))
}

/// Whether folders tell the labels of a part, or of the folder itself.
fn has_folders_of(folder: &Path, part: Option<&str>) -> bool {
    match part {
        None => label_folders::are_at(folder),
        Some(part) => names_of(part).iter().any(|name| label_folders::are_at(&folder.join(name))),
    }
}

/// The images of a part, and those that are left out of it.
pub(super) type PartFiles = (Vec<File>, Skipped);

/// Loads the training and the validation part of a folder with a table, or with folders of labels. No image is opened, unless `options`
/// ask for it, or it lies in the folders of several labels.
///
/// # Errors
/// [`DataError::Io`] if a table or folder cannot be read; [`DataError::Malformed`] naming a table and its line if it is none, names an
/// image that is not there, twice, or beyond the folder, or a cell is not what its column holds, or naming a folder as
/// [`super::folder`] does; [`DataError::Inconsistent`] for a setting that cannot be; [`DataError::Cancelled`] if `progress` says so. If
/// images are measured, also the errors of [`super::Photo::open`].
pub fn labels(
    dir: &Path,
    options: &FolderOptions,
    progress: &Progress<'_>,
) -> Result<TrainTest<PhotoFolder>, DataError> {
    threads()?;
    options.check()?;
    let (targets, names, [train, validation]) = match has_folders(dir) && !has_table(dir) {
        true => {
            let (names, parts) = label_folders::parts(dir, options, progress)?;
            (Kind::LABELS, names, parts)
        }
        false => of_tables(dir, options, progress)?,
    };
    let ((mut train, train_skipped), (validation, skipped)) = (train, validation);
    if train.is_empty() || validation.is_empty() {
        return Err(DataError::malformed(
            dir,
            "contents",
            "images to train and to validate",
            "none of a part",
        ));
    }
    // The order of a table is often that of its classes; the order of files is the same on every machine.
    train.sort_by(|a, b| a.path.cmp(&b.path));
    let preparation = &options.preparation;
    let image = |index: usize| open(dir, &train[index])?.interleaved(preparation);
    let numbers = options.normalisation.of_training((train.len(), preparation.channels), image, progress)?;
    let mut set = Set::new(dir, options, &names, info(options, (targets, &names), &numbers));
    set.scale = (targets == Kind::NUMBERS).then(|| scale_of(&train, names.len()));
    Ok(TrainTest::new(set.part(train, train_skipped)?, set.part(validation, skipped)?))
}

/// What the tables of a folder tell: the kind of targets, the names of the labels, numbers or classes, and the training and the validation
/// part.
fn of_tables(
    dir: &Path,
    options: &FolderOptions,
    progress: &Progress<'_>,
) -> Result<(Targets, Vec<String>, [PartFiles; 2]), DataError> {
    let finder = Finder::new(dir, options, progress)?;
    let (train, validation) = training_tables(dir)?;
    let tables = [Some(&train), validation.as_ref()].into_iter().flatten();
    let kind = Kind::of(tables.clone())?;
    let names = kind.names(tables)?;
    let (train, skipped) = finder.files(&train, (&kind, &names))?;
    let validation = validation.map(|table| finder.files(&table, (&kind, &names))).transpose()?;
    let parts = match validation {
        Some(validation) => [(train, skipped), validation],
        None => {
            let (train, validation) = split(dir, &options.split(), sorted(train))?;
            [(train, skipped), (validation, Skipped::new())]
        }
    };
    Ok((kind.targets, names, parts))
}

/// Loads one part for evaluation: the images of that part by the table's column `split`, or of the table or the labels' folders in the
/// part's folder. Without a name it is all of the table in `dir`, or all in its folders. The names are those of the labels, numbers or
/// classes of the training set, and `targets` are its.
///
/// # Errors
/// As [`labels`]; [`DataError::Missing`] if there is no such part; [`DataError::Inconsistent`] if `options` ask for a normalisation that
/// only the training part could give.
pub fn labels_part(
    dir: &Path,
    (part, targets): (PhotoPart<'_>, Targets),
    options: &FolderOptions,
    progress: &Progress<'_>,
) -> Result<PhotoFolder, DataError> {
    threads()?;
    options.check()?;
    let numbers = options.normalisation.of_part(options.preparation.channels)?;
    let targets = Kind::shape_of(targets);
    let names = part.class_names;
    let (files, skipped) = match has_folders_of(dir, part.name) && !has_table(dir) {
        true => label_folders::part(dir, (part, targets), options, progress)?,
        false => {
            let finder = Finder::new(dir, options, progress)?;
            let table = part_table(dir, part.name)?;
            // A part may show fewer kinds of values than the training set: a column of numbers that are 0 or 1 here.
            let kind = Kind { targets, ..Kind::of([&table].into_iter())? };
            let (files, skipped) = finder.files(&table, (&kind, names))?;
            if files.is_empty() {
                return Err(DataError::malformed(&table.file, "contents", "images of the part", "none"));
            }
            (files, skipped)
        }
    };
    Set::new(dir, options, names, info(options, (targets, names), &numbers)).part(files, skipped)
}

/// The parts that a folder's table tells of, or that have tables or folders of labels of their own.
///
/// # Errors
/// As [`labels`], if the table cannot be read.
pub fn label_parts(dir: &Path) -> Result<BTreeSet<String>, DataError> {
    if !dir.join(TABLE).is_file() {
        let has_labels = |part: &&&str| {
            let part = dir.join(part);
            part.join(TABLE).is_file() || label_folders::are_at(&part)
        };
        return Ok(PARTS.iter().filter(has_labels).map(|part| (*part).to_owned()).collect());
    }
    let table = Table::read(dir, Path::new(""))?;
    Ok(table.rows.into_iter().filter_map(|row| row.part).collect())
}

/// The scale of the training images' numbers.
fn scale_of(files: &[File], count: usize) -> ValueScale {
    let values = files.iter().filter_map(|file| match &file.target {
        FileTarget::Values(values) => Some(&values[..]),
        FileTarget::Class(_) => None,
    });
    ValueScale::of(values, count)
}

/// Files by class, and those of a class by path, as validation is chosen from.
fn sorted(mut files: Vec<File>) -> Vec<File> {
    files.sort_by(|a, b| a.class().cmp(&b.class()).then_with(|| a.path.cmp(&b.path)));
    files
}

fn info(
    options: &FolderOptions,
    (targets, names): (Targets, &[String]),
    numbers: &MeanAndStd,
) -> DatasetInfo {
    let count = names.len();
    let targets = match targets {
        Kind::LABELS => Targets::Labels { count },
        Kind::NUMBERS => Targets::Values { shape: [count, 1, 1] },
        targets => targets,
    };
    DatasetInfo { targets, ..info_of(NAME, options, count, numbers) }
}

/// A table as it was read.
struct Table {
    file: PathBuf,
    /// The folder that its images lie in, below the set's.
    below: PathBuf,
    /// The names of the columns of labels or numbers.
    columns: Vec<String>,
    rows: Vec<Row>,
}

#[derive(Clone)]
struct Row {
    /// The line in the file.
    line: u64,
    image: String,
    part: Option<String>,
    /// The cells of `columns`.
    cells: Vec<String>,
}

impl Table {
    /// Reads the table in a folder `below` the set's.
    fn read(dir: &Path, below: &Path) -> Result<Table, DataError> {
        let file = joined(dir, below).join(TABLE);
        let text = read_text(&file, LARGEST).map_err(DataError::io(&file, "read"))?;
        let text = text.trim_start_matches('\u{feff}');
        let head = text.lines().next().unwrap_or_default();
        let separator = [',', ';', '\t'].into_iter().find(|mark| head.contains(*mark)).unwrap_or(',');
        let mut reader = csv::ReaderBuilder::new()
            .delimiter(separator as u8)
            .trim(csv::Trim::All)
            .from_reader(text.as_bytes());
        let broken = |error: csv::Error| {
            DataError::malformed(&file, "rows", "as many cells as columns", error.to_string())
        };
        let header: Vec<String> = reader.headers().map_err(broken)?.iter().map(str::to_owned).collect();
        let part = header.iter().skip(1).position(|name| is_one_of(name, &PART)).map(|at| at + 1);
        let is_value = |at: &usize| *at > 0 && Some(*at) != part;
        let columns: Vec<String> = (0..header.len()).filter(is_value).map(|at| header[at].clone()).collect();
        let expected = "a column of images' files, and at least one of labels, numbers or classes";
        if !(1..=MAX_CLASSES).contains(&columns.len()) {
            let found = match columns.len() {
                0 if head.is_empty() => "an empty file".into(),
                0 => format!("the columns {}", header.join(", ")),
                count => format!("{count} columns; {MAX_CLASSES} are the most"),
            };
            return Err(DataError::malformed(&file, "columns", expected, found));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = columns.iter().find(|name| name.is_empty() || !seen.insert(name.as_str())) {
            let found = if twice.is_empty() { "one without".into() } else { format!("{twice} twice") };
            return Err(DataError::malformed(&file, "columns", "a name of its own for each", found));
        }
        let mut rows = Vec::new();
        for record in reader.records() {
            let record = record.map_err(broken)?;
            let cells = record.iter().enumerate().filter(|(at, _)| is_value(at));
            rows.push(Row {
                line: record.position().map_or(0, csv::Position::line),
                image: record[0].to_owned(),
                part: part.map(|at| record[at].to_owned()),
                cells: cells.map(|(_, cell)| cell.to_owned()).collect(),
            });
        }
        Ok(Table { file, below: below.to_owned(), columns, rows })
    }

    /// An error about a line.
    fn wrong(
        &self,
        row: &Row,
        field: &'static str,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> DataError {
        DataError::malformed(&self.file, field, expected, format!("{} in line {}", found.into(), row.line))
    }

    /// The rows of a part.
    fn of_part(&self, part: &str) -> Table {
        let rows = self.rows.iter().filter(|row| row.part.as_deref() == Some(part));
        Table {
            file: self.file.clone(),
            below: self.below.clone(),
            columns: self.columns.clone(),
            rows: rows.cloned().collect(),
        }
    }

    /// The parts that the rows name; none without that column.
    fn parts(&self) -> Result<Option<BTreeSet<String>>, DataError> {
        let mut parts = BTreeSet::new();
        for row in &self.rows {
            let Some(part) = &row.part else { return Ok(None) };
            if !PARTS.contains(&part.as_str()) {
                return Err(self.wrong(
                    row,
                    "part",
                    format!("one of {}", PARTS.join(", ")),
                    format!("{part:?}"),
                ));
            }
            parts.insert(part.clone());
        }
        Ok(Some(parts))
    }
}

/// The table of the training part and, unless a share of it is for that, that of the validation part.
fn training_tables(dir: &Path) -> Result<(Table, Option<Table>), DataError> {
    let chosen = |is_there: &dyn Fn(&str) -> bool| {
        VALIDATION.into_iter().find(|part| is_there(part)).or(Some(TEST).filter(|part| is_there(part)))
    };
    if !dir.join(TABLE).is_file() {
        let validation = chosen(&|part| dir.join(part).join(TABLE).is_file());
        let train = Table::read(dir, Path::new(TRAIN))?;
        return Ok((train, validation.map(|part| Table::read(dir, Path::new(part))).transpose()?));
    }
    let table = Table::read(dir, Path::new(""))?;
    let Some(parts) = table.parts()? else { return Ok((table, None)) };
    let validation = chosen(&|part| parts.contains(part));
    Ok((table.of_part(TRAIN), validation.map(|part| table.of_part(part))))
}

/// The table of a part of this name, or all of the folder's own table.
fn part_table(dir: &Path, part: Option<&str>) -> Result<Table, DataError> {
    let Some(part) = part else { return Table::read(dir, Path::new("")) };
    let names = names_of(part);
    let missing = || DataError::Missing {
        folder: dir.to_owned(),
        names: names.iter().map(|name| format!("{name}/{TABLE}")).collect(),
    };
    if !dir.join(TABLE).is_file() {
        let found = names.iter().find(|name| dir.join(name).join(TABLE).is_file());
        return Table::read(dir, Path::new(found.ok_or_else(missing)?));
    }
    let table = Table::read(dir, Path::new(""))?;
    let parts = table.parts()?.unwrap_or_default();
    let found = names.iter().find(|name| parts.contains(**name)).ok_or_else(missing)?;
    Ok(table.of_part(found))
}

fn is_one_of(name: &str, names: &[&str]) -> bool {
    names.iter().any(|known| name.eq_ignore_ascii_case(known))
}

/// A cell as a number, if it is a finite one.
fn number(cell: &str) -> Option<f32> {
    cell.parse().ok().filter(|number: &f32| number.is_finite())
}

/// What the columns of a table hold.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kind {
    /// The kind of targets; their number is not yet known.
    targets: Targets,
    /// Whether one column names classes or labels; else each label or number has a column.
    in_one_column: bool,
}

impl Kind {
    const LABELS: Targets = Targets::Labels { count: 0 };
    const NUMBERS: Targets = Targets::Values { shape: [0, 1, 1] };

    /// The kind of targets, without their number.
    fn shape_of(targets: Targets) -> Targets {
        match targets {
            Targets::Labels { .. } => Kind::LABELS,
            Targets::Values { .. } => Kind::NUMBERS,
            other => other,
        }
    }

    /// The kind of the columns of all tables of a set.
    fn of<'a>(tables: impl Iterator<Item = &'a Table> + Clone) -> Result<Kind, DataError> {
        let first = tables.clone().next().expect("there is a table");
        if let Some(table) = tables.clone().find(|table| table.columns != first.columns) {
            let expected = format!("those of {}, {}", first.file.display(), first.columns.join(", "));
            return Err(DataError::malformed(&table.file, "columns", expected, table.columns.join(", ")));
        }
        let cells = || tables.clone().flat_map(|table| &table.rows).flat_map(|row| &row.cells);
        let is_number = cells().all(|cell| number(cell).is_some());
        if let [name] = &first.columns[..]
            && (!is_number || is_one_of(name, &CLASS))
        {
            let several = is_one_of(name, &TAGS) || cells().any(|cell| cell.contains(SEPARATORS));
            let targets = if several { Kind::LABELS } else { Targets::Image };
            return Ok(Kind { targets, in_one_column: true });
        }
        let is_label = cells().all(|cell| number(cell).is_some_and(|number| number == 0.0 || number == 1.0));
        let targets = if is_label { Kind::LABELS } else { Kind::NUMBERS };
        Ok(Kind { targets, in_one_column: false })
    }

    /// The names of the labels, numbers or classes.
    fn names<'a>(&self, tables: impl Iterator<Item = &'a Table> + Clone) -> Result<Vec<String>, DataError> {
        let first = tables.clone().next().expect("there is a table");
        if !self.in_one_column {
            return Ok(first.columns.clone());
        }
        // What only validation has cannot be learnt.
        let names: BTreeSet<&str> =
            first.rows.iter().flat_map(|row| tags(&row.cells[0], self.targets)).collect();
        let least = if self.targets == Targets::Image { 2 } else { 1 };
        match (least..=MAX_CLASSES).contains(&names.len()) {
            true => Ok(names.into_iter().map(str::to_owned).collect()),
            false => {
                let expected = format!("{least} to {MAX_CLASSES} different ones to train on");
                Err(DataError::malformed(&first.file, "classes", expected, names.len().to_string()))
            }
        }
    }

    /// What a row says of its image. `places` are those of the labels or classes by name, or the columns of the numbers.
    fn target(
        &self,
        table: &Table,
        row: &Row,
        (places, count): (&HashMap<&str, usize>, usize),
    ) -> Result<FileTarget, DataError> {
        let place = |name: &str| {
            places.get(name).copied().ok_or_else(|| {
                table.wrong(row, "class", "one that the training part has", format!("{name:?}"))
            })
        };
        if self.targets == Targets::Image {
            return Ok(FileTarget::Class(place(&row.cells[0])?));
        }
        let mut values = vec![0.0; count];
        if self.in_one_column {
            for name in tags(&row.cells[0], self.targets) {
                values[place(name)?] = 1.0;
            }
            return Ok(FileTarget::Values(values.into()));
        }
        for (name, cell) in table.columns.iter().zip(&row.cells) {
            // A column that the model does not know.
            let Some(&place) = places.get(name.as_str()) else { continue };
            let fits = |number: &f32| self.targets == Kind::NUMBERS || *number == 0.0 || *number == 1.0;
            values[place] = number(cell).filter(fits).ok_or_else(|| {
                let expected = if self.targets == Kind::NUMBERS { "a number" } else { "0 or 1" };
                let found = if cell.is_empty() { "nothing".into() } else { format!("{cell:?}") };
                table.wrong(row, "cell", format!("{expected} as {name}"), found)
            })?;
        }
        Ok(FileTarget::Values(values.into()))
    }
}

/// The names in a cell.
fn tags(cell: &str, targets: Targets) -> impl Iterator<Item = &str> {
    let separators = if targets == Targets::Image { &[][..] } else { &SEPARATORS[..] };
    let is_one = targets == Targets::Image;
    cell.split(separators).map(str::trim).filter(move |name| is_one || !name.is_empty())
}

/// Finds the images that tables name.
struct Finder<'a> {
    dir: &'a Path,
    /// The folder without links.
    real: PathBuf,
    options: &'a FolderOptions,
    progress: &'a Progress<'a>,
}

impl<'a> Finder<'a> {
    fn new(
        dir: &'a Path,
        options: &'a FolderOptions,
        progress: &'a Progress<'a>,
    ) -> Result<Finder<'a>, DataError> {
        let real = fs::canonicalize(dir).map_err(DataError::io(dir, "list"))?;
        Ok(Finder { dir, real, options, progress })
    }

    /// The images of a table with their targets, and those that are left out.
    fn files(
        &self,
        table: &Table,
        (kind, names): (&Kind, &[String]),
    ) -> Result<(Vec<File>, Skipped), DataError> {
        let places: HashMap<&str, usize> = names.iter().map(String::as_str).zip(0..).collect();
        if let Some(name) = names.iter().find(|name| !kind.in_one_column && !table.columns.contains(name)) {
            let found = table.columns.join(", ");
            return Err(DataError::malformed(&table.file, "columns", format!("one called {name}"), found));
        }
        let (mut files, mut skipped, mut seen) = (Vec::new(), Skipped::new(), HashMap::new());
        for (row, at) in table.rows.iter().zip(1..) {
            let target = kind.target(table, row, (&places, names.len()))?;
            let path = match self.image(table, row)? {
                Some(path) => path,
                None if self.options.skip_broken => {
                    let reason = format!("{}: no such image, in line {}", row.image, row.line);
                    skipped.push((PathBuf::from(&row.image), reason));
                    continue;
                }
                None => {
                    return Err(table.wrong(
                        row,
                        "image",
                        "a file in the folder",
                        format!("{:?}", row.image),
                    ));
                }
            };
            if let Some(earlier) = seen.insert(path.clone(), row.line) {
                let expected = format!("each image once; it was in line {earlier}");
                return Err(table.wrong(row, "image", expected, format!("{:?}", row.image)));
            }
            files.push(File { path, target });
            if u64::is_multiple_of(at, ROWS_PER_REPORT) {
                self.report(at, table.rows.len())?;
            }
        }
        self.report(table.rows.len() as u64, table.rows.len())?;
        if self.options.skip_broken {
            let path = |file: &File| file.path.clone();
            let (sound, broken) = sound(files, path, |file| open(self.dir, file).map(|_| ()), self.progress)?;
            skipped.extend(broken);
            return Ok((sound, skipped));
        }
        Ok((files, skipped))
    }

    /// The image of a row, below the set's folder, if it is there.
    fn image(&self, table: &Table, row: &Row) -> Result<Option<PathBuf>, DataError> {
        let path = Path::new(&row.image);
        let is_within = |part: Component<'_>| matches!(part, Component::Normal(_) | Component::CurDir);
        if row.image.is_empty() || !path.components().all(is_within) {
            let expected = "a path below the folder of the table";
            return Err(table.wrong(row, "image", expected, format!("{:?}", row.image)));
        }
        let own = path.file_name().is_some_and(|name| has_extension(name, &EXTENSIONS));
        let endings = if own { &[""][..] } else { &EXTENSIONS[..] };
        for folder in [table.below.clone(), table.below.join(IMAGES), PathBuf::new(), PathBuf::from(IMAGES)] {
            for ending in endings {
                let mut name = folder.join(path).into_os_string();
                if !ending.is_empty() {
                    name.push(".");
                    name.push(ending);
                }
                let below: PathBuf = Path::new(&name).components().collect();
                let file = self.dir.join(&below);
                if file.is_file() {
                    self.check_link(&file)?;
                    return Ok(Some(below));
                }
            }
        }
        Ok(None)
    }

    /// Fails if a file lies beyond the set's folder.
    fn check_link(&self, file: &Path) -> Result<(), DataError> {
        let target = fs::canonicalize(file).map_err(DataError::io(file, "follow the link"))?;
        match self.options.follow_links {
            true => Ok(()),
            false => check_within((self.dir, &self.real), file, &target),
        }
    }

    fn report(&self, done: u64, total: usize) -> Result<(), DataError> {
        let total = Some(total as u64);
        report(
            self.progress,
            ProgressEvent { stage: "finding images", done, total, unit: ProgressUnit::Files },
        )
    }
}

#[cfg(test)]
mod tests;
