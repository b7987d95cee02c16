//! How good a model is, class by class: what `evaluate` tells, and the parts of a page about it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use convoke_files::escaped;
use serde::Serialize;

use crate::nn::data::Dataset;
use crate::nn::data::photos::{Thumbnail, heat_thumbnail, thumbnail};
use crate::nn::metrics::Confusion;
use crate::nn::training::{Evaluation, JudgedImage, ModelCard};

use super::chart;
use super::page::{columns, escape, table};
use super::text::thousands;

/// The longest side of the pictures on a page, in pixels.
const PICTURE: usize = 112;
/// With more classes, the squares of the confusion matrix have no names, and its numbers would not be readable.
const NAMED: usize = 40;
const NUMBERED: usize = 12;
/// With more classes there is no matrix.
const MOST: usize = 200;
/// What the second picture of an image shows.
const HEAT: &str = " Below each, colours from black (none) through purple and orange to light yellow (the most in the image) tell where \
    the evidence lies for what it was taken for (Grad-CAM).";
/// What tells of that picture where it is not shown.
const HEAT_ELSEWHERE: &str =
    " <code>convoke evaluate RUN --report FILE.html --explain</code> shows where in them the evidence lies.";
/// Longer names are cut in the matrix.
const LONGEST: usize = 14;

/// Results on a data set, with what it takes to show them.
pub(crate) struct Judged {
    pub(crate) evaluation: Evaluation,
    /// The data that the model was judged on.
    pub(crate) data: Arc<dyn Dataset>,
    /// What the model is, with the names of its classes.
    pub(crate) card: ModelCard,
    /// Where the evidence lies for what images were taken for, by their index: H x W numbers each.
    pub(crate) heat: BTreeMap<usize, Vec<f32>>,
}

/// The results for one class.
#[derive(Serialize)]
pub(crate) struct ClassResults {
    pub(crate) name: String,
    /// Images or pixels of this class.
    pub(crate) count: u64,
    /// The share of these that the model found; none if there are none.
    pub(crate) recall: Option<f64>,
    /// The share of what it took for this class that was of it; none if it took nothing for it.
    pub(crate) precision: Option<f64>,
    /// Where pixels have classes: intersection over union.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) iou: Option<f64>,
    /// Where images have any number of labels: the harmonic mean of recall and precision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) f1: Option<f64>,
}

/// The results for one of the numbers that are predicted.
#[derive(Serialize)]
pub(crate) struct ValueResults {
    pub(crate) name: String,
    pub(crate) mean_absolute_error: f64,
    pub(crate) root_mean_squared_error: f64,
    /// The coefficient of determination; none if all true numbers are alike.
    pub(crate) r2: Option<f64>,
}

impl Judged {
    /// The results for each number that is predicted.
    pub(crate) fn values(&self) -> Vec<ValueResults> {
        let Some(errors) = &self.evaluation.errors else { return Vec::new() };
        let (absolute, squared, r2) = (errors.mean_absolute(), errors.root_mean_squared(), errors.r2());
        let of = |at: usize| ValueResults {
            name: self.card.class_name(at).into_owned(),
            mean_absolute_error: absolute[at],
            root_mean_squared_error: squared[at],
            r2: r2[at],
        };
        (0..errors.len()).map(of).collect()
    }

    /// The results for each label, where images have any number of them.
    fn labels(&self) -> Vec<ClassResults> {
        let Some(labels) = &self.evaluation.labels else { return Vec::new() };
        let (count, recall, precision, f1) =
            (labels.labelled(), labels.recall(), labels.precision(), labels.f1());
        let of = |at: usize| ClassResults {
            name: self.card.class_name(at).into_owned(),
            count: count[at],
            recall: recall[at],
            precision: precision[at],
            iou: None,
            f1: f1[at],
        };
        (0..labels.len()).map(of).collect()
    }

    /// The results for each class or label; none where there are neither.
    pub(crate) fn classes(&self) -> Vec<ClassResults> {
        if self.evaluation.labels.is_some() {
            return self.labels();
        }
        let Some(confusion) = &self.evaluation.confusion else { return Vec::new() };
        let (labelled, recall, precision) = (confusion.labelled(), confusion.recall(), confusion.precision());
        let iou = confusion.iou();
        let of_pixels = self.data.info().targets.are_of_pixels();
        let of = |class: usize| ClassResults {
            name: self.card.class_name(class).into_owned(),
            count: u64::try_from(labelled[class]).unwrap_or(u64::MAX),
            recall: recall[class],
            precision: precision[class],
            iou: iou[class].filter(|_| of_pixels),
            f1: None,
        };
        (0..confusion.classes()).map(of).collect()
    }

    /// The rows of a table of the classes, labels or numbers, a heading first; none where there are none of them.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<String>>();
        let values = self.values();
        if !values.is_empty() {
            let heading = texts(&["number", "mean absolute error", "root mean squared error", "R2"]);
            let row = |value: ValueResults| {
                let r2 = value.r2.map_or_else(|| "-".into(), |r2| format!("{r2:.4}"));
                let errors = [value.mean_absolute_error, value.root_mean_squared_error];
                let [absolute, squared] = errors.map(|error| format!("{error:.4}"));
                vec![escaped(&value.name).to_string(), absolute, squared, r2]
            };
            return [heading].into_iter().chain(values.into_iter().map(row)).collect();
        }
        let classes = self.classes();
        if classes.is_empty() {
            return Vec::new();
        }
        let optional = |share: Option<f64>| share.map_or_else(|| "-".into(), percent);
        let has_iou = classes.iter().any(|class| class.iou.is_some());
        let are_labels = self.evaluation.labels.is_some();
        let what = if are_labels { "label" } else { "class" };
        let mut heading = texts(&[what, "count", "recall", "precision"]);
        heading.extend(has_iou.then(|| "IoU".to_owned()));
        heading.extend(are_labels.then(|| "F1".to_owned()));
        let mut rows = vec![heading];
        for class in classes {
            let count = thousands(class.count as usize);
            let name = escaped(&class.name).to_string();
            let mut row = vec![name, count, optional(class.recall), optional(class.precision)];
            row.extend(has_iou.then(|| optional(class.iou)));
            row.extend(are_labels.then(|| optional(class.f1)));
            rows.push(row);
        }
        rows
    }

    /// The parts of a page: a table of the classes, the confusion matrix, and the images with the highest and the lowest loss.
    pub(crate) fn sections(&self) -> String {
        let mut text = String::new();
        let rows = self.rows();
        if rows.is_empty() {
            return text;
        }
        let matrix = self.evaluation.confusion.as_ref().filter(|confusion| confusion.classes() <= MOST);
        let matrix = matrix.map_or_else(String::new, |confusion| self.matrix(confusion));
        let heading = match (&self.evaluation.labels, &self.evaluation.errors) {
            (Some(_), _) => "Labels",
            (None, Some(_)) => "Numbers",
            (None, None) => "Classes",
        };
        text.push_str(&columns(&[format!("<h2>{heading}</h2>\n{}\n", table(&rows)), matrix]));
        let Evaluation { hardest, easiest, .. } = &self.evaluation;
        // Of few images the surest are among those with the highest losses, too.
        let is_shown = |image: &&JudgedImage| {
            image.label == image.predicted && hardest.iter().all(|shown| shown.index != image.index)
        };
        let right: Vec<JudgedImage> = easiest.iter().filter(is_shown).copied().collect();
        let mut heat = match (self.heat.is_empty(), self.data.photos()) {
            (false, _) => HEAT,
            (true, Some(_)) => HEAT_ELSEWHERE,
            (true, None) => "",
        };
        for (heading, what, images) in [
            ("Highest losses", "The images whose class the model found least likely.", hardest),
            ("Right and sure", "The images whose class the model found most likely.", &right),
        ] {
            let images: String = images.iter().filter_map(|image| self.picture(image)).collect();
            if !images.is_empty() {
                let heat = std::mem::take(&mut heat);
                let _ = write!(
                    text,
                    "<h2>{heading}</h2>\n<p>{what}{heat}</p>\n<ul class=\"pictures\">\n{images}</ul>\n"
                );
            }
        }
        text
    }

    /// The confusion matrix as squares: the darker, the larger the share of a row's class that was taken for the column's.
    fn matrix(&self, confusion: &Confusion) -> String {
        let (classes, counts) = (confusion.classes(), confusion.counts());
        let names: Vec<String> = (0..classes).map(|class| self.card.class_name(class).into_owned()).collect();
        let named = classes <= NAMED;
        let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).min(LONGEST);
        // Letters are up to 12 units wide, on narrow screens.
        let margin = if named { 16.0 + 12.0 * longest as f64 } else { 24.0 };
        let cell = ((chart::SIZE.0 - margin) / classes as f64).min(200.0);
        let [width, height] = [margin + cell * classes as f64 + 2.0; 2];
        let mut svg = chart::open("", height.round(), "how often each class was taken for each");
        let _ = writeln!(
            svg,
            "<path class=\"grid\" d=\"M{margin:.1} {margin:.1}H{0:.1}V{1:.1}H{margin:.1}Z\"/>",
            width - 2.0,
            height - 2.0
        );
        for row in 0..classes {
            let counts = &counts[row * classes..][..classes];
            let all: u64 = counts.iter().sum();
            let y = margin + cell * row as f64;
            for (column, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
                let (x, share) = (margin + cell * column as f64, count as f64 / all.max(1) as f64);
                let kind = if row == column { "right" } else { "wrong" };
                let [truth, taken] = [row, column].map(|class| escape(&names[class]));
                let _ = writeln!(
                    svg,
                    "<rect class=\"{kind}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{cell:.1}\" height=\"{cell:.1}\" \
                     fill-opacity=\"{:.3}\"><title>{truth} taken for {taken}: {} ({})</title></rect>",
                    // The faintest can be told from none, and numbers can be read on the strongest.
                    0.06 + 0.49 * share,
                    thousands(count as usize),
                    percent(share)
                );
                if classes <= NUMBERED {
                    let _ = writeln!(
                        svg,
                        "<text class=\"count\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{:.0}</text>",
                        x + cell / 2.0,
                        y + cell / 2.0 + 5.0,
                        100.0 * share
                    );
                }
            }
        }
        if named {
            for (class, name) in names.iter().enumerate() {
                let short: String = match name.chars().count() > longest {
                    true => name.chars().take(longest - 1).chain(['…']).collect(),
                    false => name.clone(),
                };
                let (short, place) = (escape(&short), margin + cell * (class as f64 + 0.5) + 4.0);
                let _ = writeln!(
                    svg,
                    "<text x=\"{0:.1}\" y=\"{place:.1}\" text-anchor=\"end\">{short}</text>\n\
                     <text transform=\"translate({place:.1} {0:.1}) rotate(-90)\">{short}</text>",
                    margin - 6.0
                );
            }
        }
        svg.push_str("</svg>");
        let numbers = if classes <= NUMBERED { "Numbers are percents of a row. " } else { "" };
        format!(
            "<h2>Confusion</h2>\n<p>Rows are the true classes, columns what the model took them for. {numbers}Blue is right, orange \
             is wrong.</p>\n<figure>\n{svg}\n</figure>\n"
        )
    }

    /// The images with the highest loss, with what they show and what it was taken for.
    pub(crate) fn pictures(&self) -> Vec<(String, Thumbnail)> {
        let picture = |(rank, image): (usize, &JudgedImage)| {
            let text = format!("highest losses/{}: {}", rank + 1, self.text(image));
            Some((text, self.thumbnail(image)?))
        };
        self.evaluation.hardest.iter().enumerate().filter_map(picture).collect()
    }

    /// None if the image can no longer be read, or its loss is not finite.
    fn thumbnail(&self, image: &JudgedImage) -> Option<Thumbnail> {
        // After a run that diverged, all are equally wrong.
        if !image.loss.is_finite() {
            return None;
        }
        let sample = self.data.sample(image.index, None).ok()?;
        thumbnail(&sample.image, self.data.info(), PICTURE).ok()
    }

    /// The class of an image, and what it was taken for.
    fn text(&self, image: &JudgedImage) -> String {
        let [label, predicted] =
            [image.label, image.predicted].map(|class| self.card.class_name(class).into_owned());
        if image.label == image.predicted { label } else { format!("{label}, taken for {predicted}") }
    }

    /// A picture of an image with its class, what it was taken for, and its file; none if it cannot be read.
    fn picture(&self, image: &JudgedImage) -> Option<String> {
        let jpeg = self.thumbnail(image)?.jpeg;
        let file = self.data.file(image.index);
        let file = match (&file, self.data.photos().and_then(|photos| photos.folder)) {
            (Some(file), Some(folder)) => file.strip_prefix(folder).unwrap_or(file).display().to_string(),
            (Some(file), None) => file.display().to_string(),
            (None, _) => format!("number {}", image.index),
        };
        let (label, text) = (escape(&self.card.class_name(image.label)), escape(&self.text(image)));
        Some(format!(
            "<li><img src=\"data:image/jpeg;base64,{0}\" alt=\"{label}\">{heat}<b>{text}</b><br>{sure:.0} % sure, loss {loss:.2}<br><span class=\"file\" title=\"{1}\">{1}</span></li>\n",
            BASE64_STANDARD.encode(jpeg),
            escape(&file),
            sure = 100.0 * image.probability,
            loss = image.loss,
            heat = self.heated(image).unwrap_or_default(),
        ))
    }

    /// The picture of an image under the colours of its heat; none if that is not known.
    fn heated(&self, image: &JudgedImage) -> Option<String> {
        let heat = self.heat.get(&image.index)?;
        let sample = self.data.sample(image.index, None).ok()?;
        let picture = heat_thumbnail((&sample.image, self.data.info()), heat, PICTURE).ok()?;
        Some(format!(
            "<img src=\"data:image/jpeg;base64,{}\" alt=\"evidence for {}\">",
            BASE64_STANDARD.encode(picture.jpeg),
            escape(&self.card.class_name(image.predicted))
        ))
    }
}

/// A share as text.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.2} %", 100.0 * share)
}
