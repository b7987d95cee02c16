//! How other programs use an exported model: a page of a few lines in Python, JavaScript and Rust, beside the file.

use std::path::{Path, PathBuf};

use convoke_files::escaped;

use crate::nn::training::ModelCard;

use super::failure::Result;
use super::{console, output};

/// Writes the page of a model's file, and prints its lines of Python.
pub(crate) fn write(file: &Path, card: &ModelCard) -> Result<()> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let lines = Lines::of(&name, card);
    let page = page_of(file);
    output::write_silently("--to", &page, lines.page().as_bytes())?;
    console::note(&format!(
        "\n{}\n{} has it in JavaScript and Rust, too",
        lines.python(),
        escaped(page.display())
    ));
    Ok(())
}

/// `photos.onnx.md` for `photos.onnx`.
fn page_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".md");
    name.into()
}

/// What the lines are made of, as text of these languages.
struct Lines {
    /// A string that all three read.
    file: String,
    /// Height and width of the model's images, and of what the whole image is resized to cover.
    size: [usize; 2],
    cover: [usize; 2],
    crop: f64,
    is_grey: bool,
    /// Numbers with commas.
    mean: String,
    std: String,
    /// Strings with commas; empty if the model has no classes, labels or numbers for whole images.
    classes: String,
    shown: Shown,
    /// What the output is.
    output: &'static str,
}

/// What the output of a model for whole images becomes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    /// The likeliest classes.
    Classes,
    /// The labels that are more likely than not.
    Labels,
    /// The numbers by name.
    Numbers,
}

impl Lines {
    fn of(file: &str, card: &ModelCard) -> Lines {
        let data = &card.data;
        let size = [data.height, data.width];
        let crop = card.photos.as_ref().map_or(1.0, |photos| photos.crop_fraction);
        let numbers = |numbers: &[f32]| numbers.iter().map(f32::to_string).collect::<Vec<_>>().join(", ");
        let (of_classes, of_pixels) = (data.targets.are_classes(), data.targets.are_of_pixels());
        let classes = match of_pixels {
            false => {
                (0..data.classes).map(|class| quoted(&card.class_name(class))).collect::<Vec<_>>().join(", ")
            }
            true => String::new(),
        };
        let are_labels = data.targets.are_labels();
        Lines {
            file: quoted(file),
            size,
            cover: size.map(|side| (side as f64 / crop).round() as usize),
            crop,
            is_grey: data.channels == 1,
            mean: numbers(&data.mean),
            std: numbers(&data.std),
            classes,
            shown: match (of_classes, are_labels) {
                (true, _) => Shown::Classes,
                (false, true) => Shown::Labels,
                (false, false) => Shown::Numbers,
            },
            output: match (of_classes, of_pixels) {
                (false, false) if are_labels => {
                    "scores of the labels, 1 x C; their sigmoids are probabilities"
                }
                (false, false) => "the numbers, 1 x C",
                (true, false) => "scores of the classes, 1 x C",
                (true, true) => "scores of the classes of each pixel, 1 x C x H x W",
                (false, _) => "values",
            },
        }
    }

    fn python(&self) -> String {
        let Lines { file, size: [height, width], cover: [rows, columns], mean, std, classes, .. } = self;
        let (mode, axes) = match self.is_grey {
            true => ("L", "[None, None]"),
            false => ("RGB", ".transpose(2, 0, 1)[None]"),
        };
        let end = match classes.is_empty() {
            true => format!("print(output.shape)  # {}\n", self.output),
            false => match self.shown {
                Shown::Classes => {
                    "scores = numpy.exp(output[0] - output[0].max())\n\
                     for share, name in sorted(zip(scores / scores.sum(), CLASSES), reverse=True)[:5]:\n    \
                         print(f\"{name} {share:.2%}\")\n"
                }
                Shown::Labels => {
                    "for share, name in zip(1 / (1 + numpy.exp(-output[0])), CLASSES):\n    \
                         if share > 0.5:\n        \
                             print(f\"{name} {share:.2%}\")\n"
                }
                Shown::Numbers => "for value, name in zip(output[0], CLASSES):\n    print(name, value)\n",
            }
            .into(),
        };
        let classes = if classes.is_empty() { String::new() } else { format!("CLASSES = [{classes}]\n") };
        format!(
            "import sys\n\
             import numpy, onnxruntime\n\
             from PIL import Image, ImageOps\n\
             \n\
             {classes}MEAN, STD = numpy.array([{mean}]), numpy.array([{std}])\n\
             \n\
             image = ImageOps.exif_transpose(Image.open(sys.argv[1])).convert(\"{mode}\")\n\
             if {rows} * image.width >= {columns} * image.height:\n    \
                 image = image.resize(({rows} * image.width // image.height, {rows}), Image.Resampling.BILINEAR)\n\
             else:\n    \
                 image = image.resize(({columns}, {columns} * image.height // image.width), Image.Resampling.BILINEAR)\n\
             left, top = round((image.width - {width}) / 2), round((image.height - {height}) / 2)\n\
             image = image.crop((left, top, left + {width}, top + {height}))\n\
             pixels = (numpy.asarray(image) / 255 - MEAN{dims}) / STD{dims}\n\
             session = onnxruntime.InferenceSession({file})\n\
             (output,) = session.run(None, {{session.get_inputs()[0].name: pixels{axes}.astype(numpy.float32)}})\n\
             {end}",
            dims = if self.is_grey { "[0]" } else { "" },
        )
    }

    fn javascript(&self) -> String {
        let Lines { file, size: [height, width], cover: [rows, columns], mean, std, classes, .. } = self;
        let end = match classes.is_empty() {
            true => format!("console.log(output.dims);  // {}\n", self.output),
            false if self.shown == Shown::Labels => format!(
                "const classes = [{classes}];\n\
                 const shares = Array.from(output.data, (score) => 1 / (1 + Math.exp(-score)));\n\
                 console.log(classes.map((name, at) => [name, shares[at]]).filter(([, share]) => share > 0.5));\n"
            ),
            false if self.shown == Shown::Numbers => format!(
                "const classes = [{classes}];\n\
                 console.log(classes.map((name, at) => [name, output.data[at]]));\n"
            ),
            false => format!(
                "const classes = [{classes}];\n\
                 const most = Math.max(...output.data);\n\
                 const scores = Array.from(output.data, (score) => Math.exp(score - most));\n\
                 const sum = scores.reduce((sum, score) => sum + score);\n\
                 console.log(classes.map((name, at) => [name, scores[at] / sum]).sort((a, b) => b[1] - a[1]));\n"
            ),
        };
        let (channels, pixel) = match self.is_grey {
            true => (
                1,
                "const [r, g, b] = [0, 1, 2].map((at) => data[4 * place + at]);\n    const value = 0.299 * r + 0.587 * g + 0.114 * b;",
            ),
            false => (3, "const value = data[4 * place + channel];"),
        };
        format!(
            "import * as ort from \"onnxruntime-web\";\n\
             \n\
             // `image` is an <img> that has been loaded. The browser's resizing differs a little from training's.\n\
             const [mean, std] = [[{mean}], [{std}]];\n\
             const scale = Math.max({rows} / image.naturalHeight, {columns} / image.naturalWidth);\n\
             const [w, h] = [image.naturalWidth * scale, image.naturalHeight * scale];\n\
             const context = new OffscreenCanvas({width}, {height}).getContext(\"2d\");\n\
             context.imageSmoothingQuality = \"high\";\n\
             context.drawImage(image, ({width} - w) / 2, ({height} - h) / 2, w, h);\n\
             const {{ data }} = context.getImageData(0, 0, {width}, {height});\n\
             const pixels = new Float32Array({channels} * {height} * {width});\n\
             for (let channel = 0; channel < {channels}; channel++) {{\n  \
               for (let place = 0; place < {height} * {width}; place++) {{\n    \
                 {pixel}\n    \
                 pixels[channel * {height} * {width} + place] = (value / 255 - mean[channel]) / std[channel];\n  \
               }}\n\
             }}\n\
             const session = await ort.InferenceSession.create({file});\n\
             const input = new ort.Tensor(\"float32\", pixels, [1, {channels}, {height}, {width}]);\n\
             const output = (await session.run({{ [session.inputNames[0]]: input }}))[session.outputNames[0]];\n\
             {end}"
        )
    }

    fn rust(&self) -> String {
        let Lines { file, size: [height, width], crop, mean, std, .. } = self;
        let channels = if self.is_grey { 1 } else { 3 };
        format!(
            "use std::path::Path;\n\
             use convoke::nn::{{Forward, Init, ModuleExt, data::photos::{{Photo, Preparation}}, graph::Graph, modules::ConvBnMode, onnx}};\n\
             use convoke::{{Device, Tensor, inference_mode}};\n\
             \n\
             fn scores(photo: &Path) -> Result<Vec<f32>, Box<dyn std::error::Error>> {{\n    \
                 let device = Device::cpu()?;\n    \
                 let definition = onnx::read(Path::new({file}))?.definition;\n    \
                 let model = Graph::new(&definition.into(), &Init::new(&device, 0), ConvBnMode::Fused)?;\n    \
                 model.eval();\n    \
                 let (mean, std): ([f32; {channels}], [f32; {channels}]) = ([{mean}], [{std}]);\n    \
                 let preparation = Preparation {{ size: [{height}, {width}], channels: {channels}, crop_fraction: {crop:?} }};\n    \
                 let bytes = Photo::open(photo)?.prepared(&preparation)?;\n    \
                 let plane = {height} * {width};\n    \
                 let pixel = |(at, byte): (usize, &u8)| (f32::from(*byte) / 255.0 - mean[at / plane]) / std[at / plane];\n    \
                 let pixels: Vec<f32> = bytes.iter().enumerate().map(pixel).collect();\n    \
                 let image = Tensor::from_slice(&device, &[1, {channels}, {height}, {width}], &pixels)?;\n    \
                 // {output}\n    \
                 Ok(inference_mode(|| model.forward(&image))?.to_vec()?)\n\
             }}\n",
            output = self.output,
        )
    }

    fn page(&self) -> String {
        format!(
            "# {}\n\nThe model takes 1 x {} x {} x {} numbers and gives {}.\n\n\
             ## Python\n\n`pip install onnxruntime pillow`, then `python this.py PHOTO`:\n\n```python\n{}```\n\n\
             ## JavaScript\n\n`npm install onnxruntime-web`:\n\n```js\n{}```\n\n## Rust\n\nWith the library convoke:\n\n```rust\n{}```\n",
            self.file.trim_matches('"'),
            if self.is_grey { 1 } else { 3 },
            self.size[0],
            self.size[1],
            self.output,
            self.python(),
            self.javascript(),
            self.rust()
        )
    }
}

/// Text from a file as a string that Python, JavaScript and Rust read alike, on one line and in ASCII marks only.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in escaped(text).to_string().chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '`' => quoted.push('\''),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_files_end_no_string_and_no_block() {
        assert_eq!(quoted("a\"b\\c```\nd"), "\"a\\\"b\\\\c'''\\\\nd\"");
    }
}
