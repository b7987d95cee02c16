//! Masks whose colours stand for classes.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use convoke_files::read_text;

use super::super::png_file::{Content, Raster};
use super::super::{DataError, Progress};
use super::masks::{MAX_MASK_CLASSES, MaskOptions, NO_CLASS, decode_mask};
use super::measure::in_parallel;

/// Names of the file that tells the colours.
const FILES: [&str; 4] = ["colours.txt", "colors.txt", "label_colours.txt", "label_colors.txt"];
/// Names of classes that stand for none.
const NONE: [&str; 4] = ["void", "ignore", "unlabelled", "unlabeled"];
const MAX_BYTES: u64 = 1 << 20;

type Colour = [u8; 3];
/// The names of classes, in their order.
type Names = Arc<[String]>;

/// How masks tell the classes of pixels.
#[derive(Clone, Debug)]
pub(super) enum Coding {
    /// By numbers.
    Numbers,
    /// By colours.
    Colours(Arc<HashMap<Colour, u8>>),
}

/// The colours of classes, in the order of these.
struct Colours {
    /// What tells them, for errors.
    origin: PathBuf,
    classes: Vec<(Colour, String)>,
    /// The colours of pixels without a class.
    none: Vec<Colour>,
}

impl Coding {
    /// The coding of a set, and the names of the classes if colours tell these. All masks are decoded if no file tells the colours.
    pub(super) fn of_training<'a>(
        dir: &Path,
        options: &MaskOptions,
        masks: impl Iterator<Item = &'a Path> + Clone,
        progress: &Progress<'_>,
    ) -> Result<(Coding, Option<Names>), DataError> {
        let Some(first) = masks.clone().next() else { return Ok((Coding::Numbers, None)) };
        let colours = match Colours::read(dir, options)? {
            Some(colours) => colours,
            // A number of classes is one of class numbers.
            None if options.classes.is_some() || !is_of_colours(dir, first) => {
                return Ok((Coding::Numbers, None));
            }
            None => Colours::collect((dir, &masks.collect::<Vec<_>>()), options.skip_broken, progress)?,
        };
        let names = colours.classes.iter().map(|(_, name)| name.clone()).collect();
        Ok((colours.coding(|_, at| Some(at))?, Some(names)))
    }

    /// The coding of a part for evaluation, whose classes have these names.
    pub(super) fn of_part(
        dir: &Path,
        options: &MaskOptions,
        first: Option<&Path>,
        class_names: &[String],
    ) -> Result<Coding, DataError> {
        let colours = match Colours::read(dir, options)? {
            Some(colours) => colours,
            None if !first.is_some_and(|first| is_of_colours(dir, first)) => return Ok(Coding::Numbers),
            None => Colours::named(dir, class_names)?,
        };
        colours.coding(|name, _| class_names.iter().position(|class| class == name))
    }

    /// Decodes a mask; errors name its path below the set's folder.
    pub(super) fn mask(&self, dir: &Path, path: &Path) -> Result<Raster, DataError> {
        let Coding::Colours(known) = self else { return decode_mask(dir, path, Content::Classes) };
        let Raster { size, bytes } = decode_mask(dir, path, Content::Rgb)?;
        let mut classes = convoke_memory::with_capacity(bytes.len() / 3)?;
        // Neighbours mostly have one colour.
        let mut last = None;
        for colour in bytes.as_chunks::<3>().0 {
            let class = match last {
                Some((seen, class)) if seen == *colour => class,
                _ => *known.get(colour).ok_or_else(|| {
                    let expected = "a colour of one of the classes";
                    DataError::malformed(path, "colour", expected, text(*colour))
                })?,
            };
            last = Some((*colour, class));
            classes.push(class);
        }
        Ok(Raster { size, bytes: classes })
    }
}

impl Colours {
    /// The colours that a file tells: the one that the options name, or one in the set's folder, if there is such a file.
    fn read(dir: &Path, options: &MaskOptions) -> Result<Option<Colours>, DataError> {
        let in_folder = || FILES.iter().map(|name| dir.join(name)).find(|file| file.is_file());
        let Some(file) = options.colours.clone().or_else(in_folder) else { return Ok(None) };
        let text = read_text(&file, MAX_BYTES).map_err(DataError::io(&file, "read"))?;
        let mut colours = Colours { origin: file.clone(), classes: Vec::new(), none: Vec::new() };
        let lines = text.trim_start_matches('\u{feff}').lines().zip(1..);
        for (line, number) in lines.filter(|(line, _)| !line.trim().is_empty()) {
            let parsed = || -> Option<(Colour, String)> {
                let mut words = line.split_whitespace();
                let mut part = || words.next()?.parse::<u8>().ok();
                let colour = [part()?, part()?, part()?];
                let name = words.collect::<Vec<_>>().join(" ");
                (!name.is_empty()).then_some((colour, name))
            };
            let Some((colour, name)) = parsed() else {
                let expected = "red, green and blue from 0 to 255, and a name";
                return Err(DataError::malformed(
                    &file,
                    "line",
                    expected,
                    format!("{line:?}, line {number}"),
                ));
            };
            match NONE.iter().any(|none| name.eq_ignore_ascii_case(none)) {
                true => colours.none.push(colour),
                false => colours.classes.push((colour, name)),
            }
        }
        Ok(Some(colours))
    }

    /// Each colour of any mask, as a class of its own.
    fn collect(
        (dir, masks): (&Path, &[&Path]),
        skip_broken: bool,
        progress: &Progress<'_>,
    ) -> Result<Colours, DataError> {
        let of_mask = |index: usize| -> Result<BTreeSet<Colour>, DataError> {
            let bytes = decode_mask(dir, masks[index], Content::Rgb)?.bytes;
            let mut found = BTreeSet::new();
            for colour in bytes.as_chunks::<3>().0 {
                // A photograph is no mask; what is too much is told below.
                if found.len() <= MAX_MASK_CLASSES {
                    found.insert(*colour);
                }
            }
            Ok(found)
        };
        let mut all = BTreeSet::new();
        for found in in_parallel("collecting colours", masks.len(), of_mask, progress)? {
            match found {
                Ok(colours) => all.extend(colours),
                // It is left out later.
                Err(_) if skip_broken => {}
                Err(error) => return Err(error),
            }
        }
        let classes = all.into_iter().map(|colour| (colour, text(colour))).collect();
        Ok(Colours { origin: dir.to_owned(), classes, none: Vec::new() })
    }

    /// The colours of classes that are called by their colours.
    fn named(dir: &Path, class_names: &[String]) -> Result<Colours, DataError> {
        let classes = class_names.iter().map(|name| {
            colour(name).map(|colour| (colour, name.clone())).ok_or_else(|| {
                let expected = format!("{} with the colour of the class {name}", FILES[0]);
                DataError::malformed(dir, "layout", expected, "masks of colours without such a file")
            })
        });
        Ok(Colours { origin: dir.to_owned(), classes: classes.collect::<Result<_, _>>()?, none: Vec::new() })
    }

    /// The coding in which `place` gives the number of a class by its name and place.
    fn coding(&self, place: impl Fn(&str, usize) -> Option<usize>) -> Result<Coding, DataError> {
        let count = self.classes.len();
        if !(1..=MAX_MASK_CLASSES).contains(&count) {
            let expected = format!("1 to {MAX_MASK_CLASSES} of classes");
            let found = if count > MAX_MASK_CLASSES { "more".into() } else { count.to_string() };
            return Err(DataError::malformed(&self.origin, "colours", expected, found));
        }
        let mut known: HashMap<Colour, u8> = self.none.iter().map(|colour| (*colour, NO_CLASS)).collect();
        let mut names = BTreeSet::new();
        for (at, (colour, name)) in self.classes.iter().enumerate() {
            let Some(class) = place(name, at) else {
                let expected = "a class of the training part";
                return Err(DataError::malformed(&self.origin, "class", expected, name.clone()));
            };
            if known.insert(*colour, class as u8).is_some() || !names.insert(name) {
                let found = format!("{} {name} twice", text(*colour));
                return Err(DataError::malformed(
                    &self.origin,
                    "colours",
                    "each colour and name once",
                    found,
                ));
            }
        }
        Ok(Coding::Colours(Arc::new(known)))
    }
}

/// Whether a mask is a PNG of colours.
fn is_of_colours(dir: &Path, path: &Path) -> bool {
    decode_mask(dir, path, Content::Classes).is_err() && decode_mask(dir, path, Content::Rgb).is_ok()
}

/// A colour as `#rrggbb`.
fn text([red, green, blue]: Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

/// The colour that a name is, if it is one.
fn colour(name: &str) -> Option<Colour> {
    let digits = name.strip_prefix('#').filter(|digits| digits.len() == 6 && digits.is_ascii())?;
    let part = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).ok();
    Some([part(0)?, part(2)?, part(4)?])
}
