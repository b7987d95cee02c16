//! Photographs with a class for each pixel, given by masks.
//!
//! ```text
//! DIR/train/images/NAME.jpg   DIR/train/masks/NAME.png   and the same in val and test
//! DIR/images/NAME.jpg         DIR/masks/NAME.png
//! ```
//! A mask is a PNG file of class numbers, grey of 8 bits or indices into a palette, and has the size of its image. 255 stands for no
//! class. Or it is a PNG of colours (RGB of 8 bits), a class each: `colours.txt` in the folder tells them, a line of red, green, blue and the
//! class's name each (also as `label_colors.txt`, CamVid's); the classes `void`, `ignore` and `unlabelled` stand for none. Without it each
//! colour is a class, called `#rrggbb`. Parts are as those of folders of classes; a share of the images is validated on if there is none. `classes.txt` in the
//! folder may name the classes, one a line.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use convoke_files::{open_regular, read_text};
use serde::{Deserialize, Serialize};

use super::super::dataset::SampleResult;
use super::super::png_file::{Content, Raster, Sides, decode_sized};
use super::super::threads::threads;
use super::super::{
    DataError, Dataset, DatasetInfo, PhotoOrigin, Pixels, Progress, Sample, Target, Targets, TrainTest,
};
use super::augmentation::PhotoAugmentation;
use super::cache::{Budget, Cache};
use super::colours::Coding;
use super::decode::{MAX_PIXELS, MAX_SIDE};
use super::geometry::{Preparation, setting};
use super::layout::{Layout, PhotoPart, part_folder};
use super::listing::{EXTENSIONS, Lister, MASK_EXTENSIONS, absolute, joined};
use super::measure::{MeanAndStd, Normalisation, Skipped, in_parallel, sound};
use super::photo::{self, Photo};
use super::split::{Split, train_and_validation};
use super::view;

/// The class number of pixels without a class, as in PASCAL VOC's masks.
pub const NO_CLASS: u8 = 255;
/// The most classes that masks can tell apart: class numbers are bytes, one of which stands for no class.
pub const MAX_MASK_CLASSES: usize = NO_CLASS as usize;
const NAME: &str = "masks";
const IMAGES: &str = "images";
const MASKS: &str = "masks";
const NAMES: &str = "classes.txt";
const MAX_NAMES_BYTES: u64 = 1 << 20;

/// Whether a folder holds images and masks, by the names of its folders.
pub(super) fn has_masks(folder: &Path) -> bool {
    [IMAGES, MASKS].iter().all(|name| folder.join(name).is_dir())
}

/// How a folder of photographs and masks is loaded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct MaskOptions {
    /// Height and width that images and masks are resized to, so that they cover it, and cut to. `None` leaves them as they are; then
    /// all have to have one size.
    pub size: Option<[usize; 2]>,
    /// 3 (red, green, blue) or 1 (luma).
    pub channels: usize,
    /// How many classes there are, at most 255. `None` takes the number of names in `classes.txt` or, without that, the largest class
    /// number in any mask plus one.
    pub classes: Option<usize>,
    /// The share of the images that is for validation, if the folder has no such part: above 0 and below 1.
    pub validation_share: f64,
    /// The seed by which these are chosen.
    pub seed: u64,
    /// By what pixels are normalised.
    pub normalisation: Normalisation,
    /// How training varies images and masks.
    pub augmentation: PhotoAugmentation,
    /// Whether links may lead out of the folder.
    pub follow_links: bool,
    /// Whether images that cannot be decoded, or whose mask cannot, are left out. Each is decoded once for that.
    pub skip_broken: bool,
    /// The file that tells the colours of classes; `None` looks for `colours.txt` in the folder.
    #[serde(skip)]
    pub colours: Option<PathBuf>,
    /// Bytes of memory that decoded images may stay in, so that later epochs need not decode them; 0 keeps none. Training and
    /// validation share them.
    pub cache_bytes: usize,
}

impl Default for MaskOptions {
    fn default() -> MaskOptions {
        MaskOptions {
            size: None,
            channels: 3,
            classes: None,
            validation_share: 0.2,
            seed: 1,
            normalisation: Normalisation::default(),
            augmentation: PhotoAugmentation::for_masks(),
            follow_links: false,
            skip_broken: false,
            colours: None,
            cache_bytes: 0,
        }
    }
}

impl MaskOptions {
    fn split(&self) -> Split {
        Split { share: self.validation_share, seed: self.seed }
    }

    /// Images and masks of this size are shown whole, resized if they have another.
    fn preparation(&self, size: [usize; 2]) -> Preparation {
        Preparation { size, channels: self.channels, crop_fraction: 1.0 }
    }

    /// Checks all settings.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] naming the setting.
    pub fn check(&self) -> Result<(), DataError> {
        self.preparation(self.size.unwrap_or([1, 1])).check()?;
        if let Some(classes) = self.classes.filter(|classes| !(1..=MAX_MASK_CLASSES).contains(classes)) {
            return Err(setting("classes", format!("1 to {MAX_MASK_CLASSES}"), classes));
        }
        self.augmentation.check()?;
        self.normalisation.check(self.channels)?;
        self.split().check()
    }
}

/// Photographs with a mask each, decoded when they are asked for.
#[derive(Clone, Debug)]
pub struct PhotoMasks {
    info: DatasetInfo,
    dir: Arc<Path>,
    options: MaskOptions,
    preparation: Preparation,
    class_names: Arc<[String]>,
    coding: Coding,
    pairs: Vec<Pair>,
    skipped: Skipped,
    cache: Arc<Cache<(Photo, Raster)>>,
}

/// An image and its mask, as paths below the set's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pair {
    image: PathBuf,
    mask: PathBuf,
}

/// Loads the training and the validation part of a folder.
///
/// All masks are decoded once if the number of classes is not known, and the headers of all images are read if no size is given.
///
/// # Errors
/// [`DataError::Io`] if a folder cannot be listed; [`DataError::Missing`] if an image has no mask, a mask no image, or a folder is not
/// there; [`DataError::Malformed`] if two images have one mask, no size is given and images have several, `classes.txt` does
/// not name 1 to 255 classes, or a link leads out of the folder or to a folder that was listed already;
/// [`DataError::Inconsistent`] for a setting that cannot be; [`DataError::Cancelled`] if `progress` says so. If files are decoded,
/// also the errors of [`Photo::open`].
pub fn masks(
    dir: &Path,
    options: &MaskOptions,
    progress: &Progress<'_>,
) -> Result<TrainTest<PhotoMasks>, DataError> {
    threads()?;
    options.check()?;
    let mut lister = Lister::new(dir, options.follow_links, progress)?;
    let Layout { train, validation } = Layout::find(&lister, dir, |_| false)?;
    let train = pairs(&mut lister, dir, &train)?;
    let validation = validation.map(|below| pairs(&mut lister, dir, &below)).transpose()?;
    let unread = lister.finish()?;
    let both = || train.iter().chain(validation.iter().flatten());
    let (coding, colours) =
        Coding::of_training(dir, options, both().map(|pair| pair.mask.as_path()), progress)?;
    let [(train, train_skipped), (validation, validation_skipped)] = train_and_validation(
        train,
        validation,
        |pairs| checked(dir, options, (&coding, pairs), progress),
        |pairs| split(dir, &options.split(), pairs),
    )?;
    let both = || train.iter().chain(&validation);
    let class_names = match colours {
        Some(names) => names,
        None => class_names(dir, options, both().map(|pair| pair.mask.as_path()), progress)?,
    };
    let size = match options.size {
        Some(size) => size,
        None => common_size(dir, both().map(|pair| pair.image.as_path()), progress)?,
    };
    let preparation = options.preparation(size);
    preparation.check()?;
    let image = |index: usize| train[index].photo(dir)?.interleaved(&preparation);
    let numbers = options.normalisation.of_training((train.len(), options.channels), image, progress)?;
    let budget = Budget::new(options.cache_bytes);
    let part = |pairs: Vec<Pair>, skipped| -> Result<PhotoMasks, DataError> {
        Ok(PhotoMasks {
            info: info(&preparation, class_names.len(), &numbers),
            dir: dir.into(),
            options: options.clone(),
            preparation,
            class_names: class_names.clone(),
            coding: coding.clone(),
            cache: Arc::new(Cache::new(pairs.len(), &budget)?),
            pairs,
            skipped,
        })
    };
    Ok(TrainTest::new(part(train, [unread, train_skipped].concat())?, part(validation, validation_skipped)?))
}

/// Loads one part for evaluation. Without a name it is `images` and `masks` in `dir` itself.
///
/// # Errors
/// As [`masks`]; [`DataError::Inconsistent`] if `options` ask for a normalisation that only the training part could give.
pub fn masks_part(
    dir: &Path,
    PhotoPart { name, class_names }: PhotoPart<'_>,
    options: &MaskOptions,
    progress: &Progress<'_>,
) -> Result<PhotoMasks, DataError> {
    threads()?;
    options.check()?;
    let numbers = options.normalisation.of_part(options.channels)?;
    let mut lister = Lister::new(dir, options.follow_links, progress)?;
    let below = part_folder(&lister, dir, name)?;
    let pairs = pairs(&mut lister, dir, &below)?;
    let unread = lister.finish()?;
    let coding = Coding::of_part(dir, options, pairs.first().map(|pair| pair.mask.as_path()), class_names)?;
    let (pairs, skipped) = checked(dir, options, (&coding, pairs), progress)?;
    let size = match options.size {
        Some(size) => size,
        None => common_size(dir, pairs.iter().map(|pair| pair.image.as_path()), progress)?,
    };
    let preparation = options.preparation(size);
    Ok(PhotoMasks {
        info: info(&preparation, class_names.len(), &numbers),
        dir: dir.into(),
        options: options.clone(),
        preparation,
        class_names: class_names.into(),
        coding,
        cache: Arc::new(Cache::new(pairs.len(), &Budget::new(options.cache_bytes))?),
        pairs,
        skipped: [unread, skipped].concat(),
    })
}

impl PhotoMasks {
    /// Another part of the same folder, such as `test`, prepared and normalised as this one.
    ///
    /// # Errors
    /// As [`masks_part`].
    pub fn part(&self, name: &str, progress: &Progress<'_>) -> Result<PhotoMasks, DataError> {
        let normalisation = Normalisation::Given { mean: self.info.mean.clone(), std: self.info.std.clone() };
        let size = Some(self.preparation.size);
        let options = MaskOptions { normalisation, size, ..self.options.clone() };
        masks_part(
            &self.dir,
            PhotoPart { name: Some(name), class_names: &self.class_names },
            &options,
            progress,
        )
    }

    /// The names of the classes, or their numbers; a label is a place in this list.
    pub fn class_names(&self) -> &[String] {
        &self.class_names
    }

    /// The path of an image below the data set's folder.
    ///
    /// # Panics
    /// If `index` is not below [`Dataset::len`].
    pub fn path(&self, index: usize) -> &Path {
        &self.pairs[index].image
    }

    /// The path of a mask below the data set's folder.
    ///
    /// # Panics
    /// If `index` is not below [`Dataset::len`].
    pub fn mask_path(&self, index: usize) -> &Path {
        &self.pairs[index].mask
    }
}

impl Dataset for PhotoMasks {
    fn info(&self) -> &DatasetInfo {
        &self.info
    }

    fn len(&self) -> usize {
        self.pairs.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn photos(&self) -> Option<PhotoOrigin> {
        Some(PhotoOrigin {
            folder: absolute(&self.dir),
            crop_fraction: self.preparation.crop_fraction,
            validation_share: self.options.validation_share,
            seed: self.options.seed,
        })
    }

    fn file(&self, index: usize) -> Option<PathBuf> {
        (index < self.len()).then(|| self.dir.join(self.path(index)))
    }

    fn skipped(&self) -> &[(PathBuf, String)] {
        &self.skipped
    }

    fn variation(&self) -> Option<String> {
        Some(format!("{:?}, {:?}", self.preparation, self.options.augmentation))
    }

    fn sample(&self, index: usize, seed: Option<u64>) -> SampleResult<'_> {
        let (pair, preparation) = (&self.pairs[index], &self.preparation);
        let bytes = |(photo, mask): &(Photo, Raster)| photo.bytes() + mask.bytes.capacity();
        let opened = self.cache.get(index, bytes, || pair.open(&self.dir, &self.coding))?;
        let (photo, mask) = opened.as_ref();
        let drawn = self.options.augmentation.drawn(seed, photo.size(), preparation.size);
        let image = view::image(photo, &drawn, preparation, &self.info.mean)?;
        let classes = view::mask((&mask.bytes, mask.size), &drawn, preparation, NO_CLASS)?;
        let known = |class: u8| class == NO_CLASS || usize::from(class) < self.info.classes;
        if let Some(class) = classes.iter().find(|class| !known(**class)) {
            let expected = format!("below {}, the number of classes, or {NO_CLASS}", self.info.classes);
            return Err(DataError::malformed(&pair.mask, "class", expected, class.to_string()).into());
        }
        Ok(Sample { image: Pixels::Interleaved(image.into()), target: Target::Bytes(classes.into()) })
    }
}

impl Pair {
    fn photo(&self, dir: &Path) -> Result<Photo, DataError> {
        Photo::open_as(&dir.join(&self.image), &self.image)
    }

    /// The image and its mask, which has the same size. Errors name their paths below the set's folder.
    fn open(&self, dir: &Path, coding: &Coding) -> Result<(Photo, Raster), DataError> {
        let (photo, mask) = (self.photo(dir)?, coding.mask(dir, &self.mask)?);
        if photo.size() != mask.size {
            let [height, width] = photo.size();
            let expected = format!("{height}x{width} (height x width) as {}", self.image.display());
            let found = format!("{}x{}", mask.size[0], mask.size[1]);
            return Err(DataError::malformed(&self.mask, "size", expected, found));
        }
        Ok((photo, mask))
    }
}

/// Decodes a mask of class numbers; errors name its path below the set's folder.
fn mask(dir: &Path, path: &Path) -> Result<Raster, DataError> {
    decode_mask(dir, path, Content::Classes)
}

pub(super) fn decode_mask(dir: &Path, path: &Path, content: Content) -> Result<Raster, DataError> {
    let file = open_regular(&dir.join(path)).map_err(DataError::io(path, "open"))?;
    let sides = Sides::AtMost { side: MAX_SIDE, pixels: MAX_PIXELS };
    decode_sized(BufReader::new(file), path, content, sides)
}

fn info(preparation: &Preparation, classes: usize, (mean, std): &MeanAndStd) -> DatasetInfo {
    let &Preparation { size: [height, width], channels, .. } = preparation;
    DatasetInfo {
        targets: Targets::Pixels { ignore: Some(i64::from(NO_CLASS)) },
        ..DatasetInfo::of_images(NAME, [channels, height, width], classes, [mean, std])
    }
}

/// The images of a part with their masks, in the order of their names. There is at least one.
fn pairs(lister: &mut Lister<'_>, dir: &Path, below: &Path) -> Result<Vec<Pair>, DataError> {
    let folder = joined(dir, below);
    let missing = |folder: &Path, name: &str| DataError::Missing {
        folder: folder.to_owned(),
        names: vec![name.into()],
    };
    let folders = lister.folders(below)?;
    if let Some(name) = [IMAGES, MASKS].into_iter().find(|name| !folders.iter().any(|folder| folder == name))
    {
        let expected = "train/images and train/masks, val/images and val/masks, or images and masks";
        return Err(DataError::malformed(&folder, "layout", expected, format!("no folder {name}")));
    }
    let mut by_name = |kind: &str, extensions: &[&str]| {
        let root = below.join(kind);
        let mut files = BTreeMap::new();
        for path in lister.files(&root, extensions)? {
            let name = path.strip_prefix(&root).expect("files are below it").with_extension("");
            if let Some(other) = files.insert(name, path.clone()) {
                let found = format!("{} beside it", other.display());
                return Err(DataError::malformed(&dir.join(path), "name", "one that no other has", found));
            }
        }
        Ok(files)
    };
    let (images, mut masks) = (by_name(IMAGES, &EXTENSIONS)?, by_name(MASKS, &MASK_EXTENSIONS)?);
    let mut pairs = Vec::with_capacity(images.len());
    for (name, image) in images {
        let Some(mask) = masks.remove(&name) else {
            return Err(missing(&folder.join(MASKS), &format!("{}.png", name.display())));
        };
        pairs.push(Pair { image, mask });
    }
    if let Some(name) = masks.into_keys().next() {
        return Err(missing(&folder.join(IMAGES), &format!("{}.jpg", name.display())));
    }
    match pairs.is_empty() {
        true => Err(missing(&folder.join(IMAGES), "*.jpg")),
        false => Ok(pairs),
    }
}

/// The names of the classes, from `classes.txt` if it is there; else their numbers.
fn class_names<'a>(
    dir: &Path,
    options: &MaskOptions,
    masks: impl Iterator<Item = &'a Path>,
    progress: &Progress<'_>,
) -> Result<Arc<[String]>, DataError> {
    let file = dir.join(NAMES);
    let numbers = |count: usize| (0..count).map(|class| class.to_string()).collect();
    if file.exists() {
        let text = read_text(&file, MAX_NAMES_BYTES).map_err(DataError::io(&file, "read"))?;
        let text = text.trim_start_matches('\u{feff}').trim_end();
        let names: Vec<String> = text.lines().map(|line| line.trim().to_owned()).collect();
        let (expected, found) = (format!("1 to {MAX_MASK_CLASSES} names, one a line"), names.len());
        if let Some(line) = names.iter().position(String::is_empty) {
            let found = format!("an empty line, the {}. of {found}", line + 1);
            return Err(DataError::malformed(&file, "names", expected, found));
        }
        if !(1..=MAX_MASK_CLASSES).contains(&found) {
            return Err(DataError::malformed(&file, "names", expected, found.to_string()));
        }
        if let Some(classes) = options.classes.filter(|classes| *classes != found) {
            let expected = format!("{classes}, as many as there are to be classes");
            return Err(DataError::malformed(&file, "names", expected, found.to_string()));
        }
        return Ok(names.into());
    }
    if let Some(classes) = options.classes {
        return Ok(numbers(classes));
    }
    let masks: Vec<&Path> = masks.collect();
    let largest = |index: usize| -> Result<Option<u8>, DataError> {
        let bytes = mask(dir, masks[index])?.bytes;
        Ok(bytes.into_iter().filter(|class| *class != NO_CLASS).max())
    };
    let mut classes = 0;
    for largest in in_parallel("counting classes", masks.len(), largest, progress)? {
        classes = classes.max(largest?.map_or(0, |class| usize::from(class) + 1));
    }
    match classes {
        0 => {
            let found = format!("{NO_CLASS}, which stands for no class, everywhere");
            Err(DataError::malformed(dir, "masks", "a class for at least one pixel", found))
        }
        classes => Ok(numbers(classes)),
    }
}

/// The height and width that all images have.
fn common_size<'a>(
    dir: &Path,
    images: impl Iterator<Item = &'a Path>,
    progress: &Progress<'_>,
) -> Result<[usize; 2], DataError> {
    let images: Vec<&Path> = images.collect();
    let size = |index: usize| photo::size_as(&dir.join(images[index]), images[index]);
    let sizes = in_parallel("comparing sizes", images.len(), size, progress)?;
    let mut common = None;
    for (size, path) in sizes.into_iter().zip(&images) {
        let size = size?;
        let [height, width] = *common.get_or_insert(size);
        if size != [height, width] {
            let expected = format!(
                "{height}x{width} (height x width) as {}, or a size that all are resized to",
                images[0].display()
            );
            let found = format!("{}x{}", size[0], size[1]);
            return Err(DataError::malformed(path, "size", expected, found));
        }
    }
    Ok(common.expect("a part has at least one image"))
}

/// The pairs that can be decoded, if the others are to be left out; else all.
fn checked(
    dir: &Path,
    options: &MaskOptions,
    (coding, pairs): (&Coding, Vec<Pair>),
    progress: &Progress<'_>,
) -> Result<(Vec<Pair>, Skipped), DataError> {
    if !options.skip_broken {
        return Ok((pairs, Skipped::new()));
    }
    let path = |pair: &Pair| pair.image.clone();
    let (pairs, skipped) = sound(pairs, path, |pair| pair.open(dir, coding).map(|_| ()), progress)?;
    match pairs.is_empty() {
        true => {
            Err(DataError::malformed(dir, "contents", "images and masks", "only such that cannot be decoded"))
        }
        false => Ok((pairs, skipped)),
    }
}

fn split(dir: &Path, split: &Split, pairs: Vec<Pair>) -> Result<(Vec<Pair>, Vec<Pair>), DataError> {
    let paths: Vec<&Path> = pairs.iter().map(|pair| pair.image.as_path()).collect();
    let is_validation = split.of(&paths);
    Split::divided(pairs, &is_validation).ok_or_else(|| {
        let expected = "two images or more, as one of them is for validation";
        DataError::malformed(dir, "contents", expected, "one image")
    })
}

#[cfg(test)]
mod tests;
