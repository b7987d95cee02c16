//! `convoke predict`: what a trained model finds in images.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use clap::{Args, value_parser};
use convoke_files::{create_folder, escaped, escaped_lines};
use serde::Serialize;

use crate::nn::batch;
use crate::nn::data::photos::{Listed, MAX_MASK_CLASSES, Photo, Preparation, images_below, mask_png};
use crate::nn::data::{DatasetInfo, Loader, Pixels, Request, Sample, Target, Targets, from_fn};
use crate::{MemoryFormat, Tensor, inference_mode};

use super::console::{self, Console};
use super::explanation::{self, Explainer};
use super::failure::{Failure, Result};
use super::flags::using::UsingArgs;
use super::in_use::InUse;
use super::{dataset, json, output};

/// Which model looks at which images.
#[derive(Args)]
pub(crate) struct PredictArgs {
    /// The folder of a trained model (`train --output`) or of a checkpoint, one of its *.safetensors files, or an ONNX file.
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// Images (JPEG, PNG, GIF, TIFF, WebP, BMP), and folders of them at any depth. `-` is standard input: an image, or names of images and
    /// folders, one a line.
    #[arg(value_name = "IMAGE", required = true)]
    images: Vec<PathBuf>,

    /// How many classes are named for each image.
    #[arg(long, value_name = "K", default_value_t = 5, value_parser = value_parser!(u16).range(1..))]
    top: u16,

    /// Write a line for each image as comma-separated values: its file, then the classes with their probabilities. Names that a
    /// spreadsheet would compute, as they begin with = + - or @, get a ' before them.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Write the class of each pixel into this folder: for each image a PNG with a palette, in the image's own size. What the model
    /// did not see is 255.
    #[arg(long, value_name = "DIR")]
    masks: Option<PathBuf>,

    /// Write into this folder where the evidence for the most likely class lies (Grad-CAM): for each image a PNG of it, in its own size,
    /// under colours from black (no evidence) through purple and orange to light yellow (the most in this image). What the model did not
    /// see stays as it is. Evidence beside the object tells that the model has learnt something else.
    #[arg(long, value_name = "DIR")]
    explain: Option<PathBuf>,

    #[command(flatten)]
    using: UsingArgs,
}

/// An image to look at.
struct Image {
    file: PathBuf,
    /// Its contents, if it came by standard input.
    bytes: Option<Arc<[u8]>>,
    /// The path of its mask or explanation below the folder of these, without an ending.
    name: PathBuf,
}

/// What was found in an image.
#[derive(Default, Serialize)]
struct Found {
    image: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    predictions: Vec<Prediction>,
    /// Where images have any number of labels: those that are more likely than not.
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<Vec<String>>,
    /// What a model that predicts values gives.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    values: Vec<f64>,
    /// The names of these, if they have names.
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    value_names: Arc<[String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    explanation: Option<String>,
}

#[derive(Serialize)]
struct Prediction {
    class: String,
    /// The probability of the class or, where pixels have classes, its share of them.
    probability: f64,
}

/// What the threads that read images tell about them, by the image's index.
#[derive(Default)]
struct Noted {
    sizes: BTreeMap<usize, [usize; 2]>,
    broken: BTreeMap<usize, String>,
}

pub(crate) fn run(args: &PredictArgs) -> Result<()> {
    json::check(args.using.json.as_deref())?;
    output::check("--csv", args.csv.as_deref())?;
    let console = Console::new()?;
    let images = images(args, &console)?;
    let model = InUse::open(&args.model, &args.using, &console)?;
    let classes = model.info().classes;
    let targets = model.info().targets;
    if args.explain.is_some() {
        explanation::check(targets)?;
    }
    match (targets.are_of_pixels(), &args.masks) {
        (true, _) if targets.are_classes() && classes > MAX_MASK_CLASSES => {
            return Err(Failure::Usage(format!(
                "the model has {classes} classes of pixels; masks can tell {MAX_MASK_CLASSES} of them"
            )));
        }
        (true, Some(folder)) if targets.are_classes() => {
            check_pictures(MASKS, folder, &images)?;
        }
        (_, Some(_)) => {
            return Err(Failure::Usage("--masks: the model has no class for each pixel".into()));
        }
        (true, None) if !targets.are_classes() => {
            return Err(Failure::Usage("the model predicts values of pixels, which cannot be shown".into()));
        }
        _ => {}
    }
    let explainer = match &args.explain {
        Some(folder) => {
            let explainer = Explainer::new(&model)?;
            check_pictures(EXPLAIN, folder, &images)?;
            Some((explainer, folder.as_path()))
        }
        None => None,
    };
    let (found, broken) = predict((args, explainer.as_ref()), &model, &images, &console)?;
    let csv = args
        .csv
        .as_deref()
        .map_or(Ok(()), |file| output::write("--csv", file, csv(&found, usize::from(args.top)).as_bytes()));
    let json = json::write_value(args.using.json.as_deref(), &found);
    for (flag, folder) in [(MASKS, &args.masks), (EXPLAIN, &args.explain)] {
        if let Some(folder) = folder {
            output::announce(flag, folder);
        }
    }
    csv.and(json)?;
    if broken.is_empty() {
        return Ok(());
    }
    for reason in broken.values() {
        console::warn(&format!("cannot be read: {reason}"));
    }
    Err(Failure::Run(format!("{} of {} images could not be read", broken.len(), images.len())))
}

/// The images that the arguments name, in their order; those of folders by name.
fn images(args: &PredictArgs, console: &Console) -> Result<Vec<Image>> {
    let progress = console.data_progress();
    let mut images = Vec::new();
    let mut paths: Vec<PathBuf> = Vec::new();
    for path in &args.images {
        if path != Path::new(STDIN) {
            paths.push(path.clone());
            continue;
        }
        match read_stdin()? {
            Stdin::Image(bytes) => {
                images.push(Image { file: STDIN.into(), bytes: Some(bytes), name: "stdin".into() });
            }
            Stdin::Names(names) => paths.extend(names),
        }
    }
    for path in &paths {
        if path.is_dir() {
            let Listed { files, unread } = images_below(path, args.using.follow_links, &progress)?;
            dataset::report_skipped(&path.display().to_string(), &unread, console);
            if files.is_empty() {
                return Err(Failure::Run(format!("{}: no images in this folder", escaped(path.display()))));
            }
            images.extend(files.into_iter().map(|file| {
                let name = file.strip_prefix(path).unwrap_or(&file).with_extension("");
                Image { file, bytes: None, name }
            }));
        } else if path.exists() {
            let name = PathBuf::from(path.file_stem().unwrap_or_default());
            images.push(Image { file: path.clone(), bytes: None, name });
        } else {
            return Err(Failure::Run(format!("{}: no such file or folder", escaped(path.display()))));
        }
    }
    Ok(images)
}

/// The argument that is standard input.
const STDIN: &str = "-";
/// As many bytes as a file of an image may have.
const MOST_BYTES: u64 = 1 << 30;

/// What came by standard input.
enum Stdin {
    Image(Arc<[u8]>),
    /// Names of images and folders, one a line.
    Names(Vec<PathBuf>),
}

/// Reads standard input to its end. Text is names: images are none.
fn read_stdin() -> Result<Stdin> {
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().take(MOST_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| Failure::Run(format!("cannot read standard input: {error}")))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(Failure::Run(format!("standard input has more than {MOST_BYTES} bytes")));
    }
    match std::str::from_utf8(&bytes) {
        Ok(text) if !text.contains('\0') => {
            let names: Vec<PathBuf> =
                text.lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect();
            if names.is_empty() {
                return Err(Failure::Run(
                    "standard input is empty: it takes an image, or names of images".into(),
                ));
            }
            Ok(Stdin::Names(names))
        }
        _ => Ok(Stdin::Image(bytes.into())),
    }
}

/// Fails if the pictures of a flag cannot be written into its folder, two would have one name, or one would take the place of an image.
fn check_pictures(flag: &str, folder: &Path, images: &[Image]) -> Result<()> {
    let mut seen = HashSet::new();
    if let Some(image) = images.iter().find(|image| !seen.insert(&image.name)) {
        return Err(Failure::Usage(format!(
            "{flag}: two images would have the file {}.png, one of them {}: predict them one after the other",
            escaped(image.name.display()),
            escaped(image.file.display())
        )));
    }
    let looked_at: HashSet<PathBuf> =
        images.iter().filter_map(|image| fs::canonicalize(&image.file).ok()).collect();
    let over = |image: &&Image| {
        fs::canonicalize(picture(folder, image)).is_ok_and(|picture| looked_at.contains(&picture))
    };
    if let Some(image) = images.iter().find(over) {
        return Err(Failure::Usage(format!(
            "{flag}: the image {} would be overwritten: name another folder",
            escaped(picture(folder, image).display())
        )));
    }
    output::check_folder(flag, folder)
}

/// What the model finds in the images that can be read, and why others cannot. Prints what it finds as it comes, unless JSON is printed.
fn predict(
    (args, explainer): (&PredictArgs, Option<&(Explainer<'_>, &Path)>),
    model: &InUse,
    images: &[Image],
    console: &Console,
) -> Result<(Vec<Found>, BTreeMap<usize, String>)> {
    let noted = Arc::new(Mutex::new(Noted::default()));
    let files: Vec<_> = images.iter().map(|image| (image.file.clone(), image.bytes.clone())).collect();
    let loader = loader(model, files, noted.clone(), model.workers(&args.using))?;
    let batch_size = args.using.batch_size as usize;
    let order: Vec<u32> = (0..images.len() as u32).collect();
    let requests: Vec<Request> =
        order.chunks(batch_size).map(|chunk| Request { samples: chunk.to_vec(), views: None }).collect();
    let mut stage = console.stage("predicting", 0, Some(images.len() as u64));
    let mut found = Vec::new();
    for (index, request) in requests.iter().enumerate() {
        if console.interrupted() {
            stage.end();
            return Err(Failure::Interrupted("interrupted".into()));
        }
        requests[index..].iter().take(3).for_each(|ahead| loader.load_ahead(ahead));
        let (pixels, _) = batch(&model.device, &loader, request)?;
        let outputs = outputs(model, &pixels)?;
        let heat = explainer.map(|(explainer, _)| heat(explainer, &pixels, &outputs)).transpose()?;
        let before = found.len();
        for (place, (&sample, values)) in request.samples.iter().zip(outputs).enumerate() {
            let (index, image) = (sample as usize, &images[sample as usize]);
            let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
            let size = noted.sizes.remove(&index);
            if noted.broken.contains_key(&index) {
                continue;
            }
            drop(noted);
            let mut of_image = of_image(args, model, image, (&values, size))?;
            if let (Some((explainer, folder)), Some(heat)) = (explainer, &heat) {
                let png = explainer.png((&image.file, image.bytes.as_deref()), &heat[place])?;
                of_image.explanation = Some(write_picture(EXPLAIN, folder, image, &png)?);
            }
            found.push(of_image);
        }
        if !console::to_stdout(args.using.json.as_deref()) {
            console.print(&lines(&found[before..]))?;
        }
        stage.set(u64::from(request.samples.last().map_or(0, |last| last + 1)), "");
    }
    stage.end();
    let noted = std::mem::take(&mut *noted.lock().unwrap_or_else(PoisonError::into_inner));
    Ok((found, noted.broken))
}

/// Reads images as the model takes them. One that cannot be read is noted, and black in its batch.
fn loader(
    model: &InUse,
    files: Vec<(PathBuf, Option<Arc<[u8]>>)>,
    noted: Arc<Mutex<Noted>>,
    workers: usize,
) -> Result<Loader> {
    let preparation = model.preparation();
    let info = DatasetInfo { targets: Targets::Image, name: "images".into(), ..model.info().clone() };
    preparation.check()?;
    let data = from_fn(info, files.len(), move |index, _| {
        let read = |file: &Path, bytes: Option<&[u8]>, preparation: &Preparation| {
            let photo = bytes.map_or_else(|| Photo::open(file), |bytes| Photo::decode(bytes, file))?;
            Ok::<_, crate::nn::data::DataError>((photo.size(), photo.interleaved(preparation)?))
        };
        let (file, bytes) = &files[index];
        let read = read(file, bytes.as_deref(), &preparation);
        let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match read {
            Ok((size, bytes)) => {
                noted.sizes.insert(index, size);
                bytes
            }
            Err(error) => {
                noted.broken.insert(index, error.to_string());
                vec![0; preparation.channels * preparation.size[0] * preparation.size[1]]
            }
        };
        Ok(Sample { image: Pixels::Interleaved(bytes.into()), target: Target::Class(0) })
    })?;
    Ok(Loader::new(Arc::new(data), workers)?)
}

/// The model's output for each image of a batch: probabilities of classes, C or C x H x W, or values.
fn outputs(model: &InUse, images: &Tensor) -> Result<Vec<Vec<f32>>> {
    let output = match model.info().targets.are_classes() {
        true => inference_mode(|| model.predictor().log_probabilities(images)?.exp())?,
        false => model.predictor().values(images)?,
    };
    let values: Vec<f32> = output.to_format(MemoryFormat::Contiguous)?.to_vec()?;
    let len = values.len() / images.shape()[0].max(1);
    Ok(values.chunks(len.max(1)).map(<[f32]>::to_vec).collect())
}

/// The evidence for the most likely class of each image of a batch.
fn heat(explainer: &Explainer<'_>, images: &Tensor, outputs: &[Vec<f32>]) -> Result<Vec<Vec<f32>>> {
    let most_likely = |output: &Vec<f32>| {
        let ranked = ranked(output.iter().map(|&value| f64::from(value)), 1);
        ranked.first().map_or(0, |(class, _)| *class)
    };
    let classes: Vec<usize> = outputs.iter().map(most_likely).collect();
    explainer.heat(images, &classes)
}

/// What to tell about an image, from the model's output for it and the image's own size.
fn of_image(
    args: &PredictArgs,
    model: &InUse,
    image: &Image,
    (output, size): (&[f32], Option<[usize; 2]>),
) -> Result<Found> {
    let file = image.file.display().to_string();
    let found = |predictions, mask| Found { image: file.clone(), predictions, mask, ..Found::default() };
    let named = |class: usize, probability: f64| Prediction {
        class: model.trained.card.class_name(class).into_owned(),
        probability,
    };
    let targets = model.info().targets;
    if targets.are_labels() {
        let shares = output.iter().map(|&logit| 1.0 / (1.0 + (-f64::from(logit)).exp()));
        let likely = shares.clone().enumerate().filter(|(_, share)| *share > 0.5);
        let labels = likely.map(|(label, share)| named(label, share).class).collect();
        let ranked = ranked(shares, args.top).into_iter().map(|(label, share)| named(label, share));
        return Ok(Found { labels: Some(labels), ..found(ranked.collect(), None) });
    }
    if !targets.are_classes() {
        let value_names = model.trained.card.class_names[..].into();
        let values = output.iter().map(|&value| f64::from(value)).collect();
        return Ok(Found { values, value_names, ..found(Vec::new(), None) });
    }
    if !targets.are_of_pixels() {
        let ranked = ranked(output.iter().map(|&value| f64::from(value)), args.top);
        return Ok(found(ranked.into_iter().map(|(class, share)| named(class, share)).collect(), None));
    }
    let classes = likeliest(output, model.info().classes);
    let (prepared, size) = (model.preparation(), size.unwrap_or([model.info().height, model.info().width]));
    let restored = prepared.restored(&classes, size)?;
    let mut counts = vec![0_u64; 256];
    restored.iter().for_each(|class| counts[usize::from(*class)] += 1);
    let seen: u64 = counts.iter().take(model.info().classes).sum();
    let shares = counts.iter().take(model.info().classes).map(|&count| count as f64 / seen.max(1) as f64);
    let ranked = ranked(shares, args.top).into_iter().filter(|(_, share)| *share > 0.0);
    let predictions = ranked.map(|(class, share)| named(class, share)).collect();
    let mask = match &args.masks {
        Some(folder) => Some(write_picture(MASKS, folder, image, &mask_png(&restored, size)?)?),
        None => None,
    };
    Ok(found(predictions, mask))
}

/// The likeliest classes with their probabilities, the likeliest first.
fn ranked(shares: impl Iterator<Item = f64>, top: u16) -> Vec<(usize, f64)> {
    let mut ranked: Vec<(usize, f64)> = shares.enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    ranked.truncate(usize::from(top));
    ranked
}

/// The likeliest class of each pixel, from C x H x W probabilities of at most [`MAX_MASK_CLASSES`] classes.
fn likeliest(output: &[f32], classes: usize) -> Vec<u8> {
    let pixels = output.len() / classes.max(1);
    let class = |pixel: usize| {
        let value = |class: usize| output[class * pixels + pixel];
        (1..classes).fold(0, |best, class| if value(class) > value(best) { class } else { best }) as u8
    };
    (0..pixels).map(class).collect()
}

/// The flags that write a picture for each image.
const MASKS: &str = "--masks";
const EXPLAIN: &str = "--explain";

/// The file of an image's picture in a folder.
fn picture(folder: &Path, image: &Image) -> PathBuf {
    let mut name = image.name.clone().into_os_string();
    name.push(".png");
    folder.join(name)
}

/// Writes an image's picture into the folder of a flag, and says where it is.
fn write_picture(flag: &str, folder: &Path, image: &Image, png: &[u8]) -> Result<String> {
    let file = picture(folder, image);
    create_folder(file.parent().unwrap_or(folder)).map_err(|error| {
        Failure::Run(format!("{flag}: cannot write {}: {error}", escaped(file.display())))
    })?;
    output::write_silently(flag, &file, png)?;
    Ok(file.display().to_string())
}

/// A line for each image.
fn lines(found: &[Found]) -> String {
    let mut text = String::new();
    for Found { image, predictions, labels, values, value_names, mask, explanation } in found {
        // Of labels, those that the image hardly has are only in the files.
        let is_shown =
            |class: &String| labels.as_ref().is_none_or(|labels| labels.iter().any(|label| label == class));
        let shown = predictions.iter().filter(|prediction| is_shown(&prediction.class));
        let classes = shown.map(|Prediction { class, probability }| {
            format!("{} {:.2} %", escaped(class), 100.0 * probability)
        });
        let none = labels.iter().filter(|labels| labels.is_empty()).map(|_| "no label".to_owned());
        let values = values.iter().enumerate().map(|(at, value)| match value_names.get(at) {
            Some(name) => format!("{} {value:.6}", escaped(name)),
            None => format!("{value:.6}"),
        });
        let pictures = [("mask", mask), ("explanation", explanation)];
        let pictures = pictures.iter().filter_map(|(what, file)| Some((what, file.as_ref()?)));
        let pictures = pictures.map(|(what, file)| format!("{what} {}", escaped(file)));
        let parts: Vec<String> = classes.chain(none).chain(values).chain(pictures).collect();
        let _ = writeln!(text, "{}: {}", escaped(image), parts.join(", "));
    }
    text
}

/// A cell of comma-separated values (RFC 4180). Spreadsheets compute text that begins like a formula, and some show control characters to
/// terminals: names come from strangers.
fn cell(text: &str) -> String {
    let text = escaped_lines(text).to_string();
    let before = if text.starts_with(['=', '+', '-', '@', '\t', '\n']) { "'" } else { "" };
    match text.contains(['"', ',', '\n']) {
        true => format!("\"{before}{}\"", text.replace('"', "\"\"")),
        false => format!("{before}{text}"),
    }
}

/// The results as comma-separated values with a heading.
fn csv(found: &[Found], top: usize) -> String {
    let most = found.iter().map(|found| found.predictions.len()).max().unwrap_or(0).min(top);
    let values = found.iter().map(|found| found.values.len()).max().unwrap_or(0);
    let mut text = "image".to_owned();
    (1..=most).for_each(|rank| _ = write!(text, ",class_{rank},probability_{rank}"));
    let names = found.first().map_or(&[][..], |found| &found.value_names);
    (0..values).for_each(|at| {
        _ = match names.get(at) {
            Some(name) => write!(text, ",{}", cell(name)),
            None => write!(text, ",value_{}", at + 1),
        }
    });
    text.push_str("\r\n");
    for Found { image, predictions, values, .. } in found {
        text.push_str(&cell(image));
        for rank in 0..most {
            let _ = match predictions.get(rank) {
                Some(Prediction { class, probability }) => write!(text, ",{},{probability}", cell(class)),
                None => write!(text, ",,"),
            };
        }
        values.iter().for_each(|value| _ = write!(text, ",{value}"));
        text.push_str("\r\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_quoted_where_needed() {
        let prediction = |class: &str| Prediction { class: class.into(), probability: 0.5 };
        let found = |image: &str, predictions| Found { image: image.into(), predictions, ..Found::default() };
        let text =
            csv(&[found("a,b.jpg", vec![prediction("x \"y\""), prediction("z")]), found("c.jpg", vec![])], 5);
        assert_eq!(
            text,
            "image,class_1,probability_1,class_2,probability_2\r\n\"a,b.jpg\",\"x \"\"y\"\"\",0.5,z,0.5\r\nc.jpg,,,,\r\n"
        );
    }

    #[test]
    fn cells_compute_nothing_and_control_nothing() {
        for (text, expected) in [
            ("@SUM(1+1)*cmd|' /C calc'!A0", "'@SUM(1+1)*cmd|' /C calc'!A0"),
            ("=1,2", "\"'=1,2\""),
            ("+1", "'+1"),
            ("-1", "'-1"),
            ("\t=1", "'\t=1"),
            ("a=1", "a=1"),
            ("b\"c", "\"b\"\"c\""),
            ("\n=1", "\"'\n=1\""),
        ] {
            assert_eq!(cell(text), expected, "{text:?}");
        }
        for control in ["\u{1b}]0;title\u{7}", "\u{202e}gpj.exe", "\r=1"] {
            assert!(!cell(control).contains(['\u{1b}', '\u{7}', '\u{202e}', '\r']), "{control:?}");
        }
    }

    #[test]
    fn likeliest_classes() {
        assert_eq!(ranked([0.2, 0.5, 0.2, 0.1].into_iter(), 3), [(1, 0.5), (0, 0.2), (2, 0.2)]);
        assert_eq!(likeliest(&[0.1, 0.9, 0.5, 0.8, 0.1, 0.5], 2), [1, 0, 0]);
    }
}
