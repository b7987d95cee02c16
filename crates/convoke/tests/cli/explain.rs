//! Explanations of predictions: where the heat lies, what it is written over, and which models have none.

use std::fs;
use std::path::{Path, PathBuf};

use convoke::nn::graph::{Along, Array, Gemm, Op};
use serde_json::Value;

use super::labels::with_table;
use super::onnx::file;
use super::program::{contents, convoke, scenes, text, write_png};

/// Height and width of the photographs, the side of their patch, and where its upper left corner may be, so that the model sees it whole.
const SIZE: [usize; 2] = [48, 64];
const SIDE: usize = 12;
const ROWS: usize = 20;
const COLUMNS: usize = 24;

/// Photographs of noise with a bright patch, whose colour is the class and whose place varies. Gives each file with the place.
fn patches(folder: &Path, each: usize) -> Vec<(PathBuf, [usize; 2])> {
    let mut noise = 7_u32;
    let mut random = move |below: usize| {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (noise >> 8) as usize % below
    };
    let mut found = Vec::new();
    for (channel, class) in ["red", "green", "blue"].into_iter().enumerate() {
        for index in 0..each {
            let [top, left] = [6 + random(ROWS), 14 + random(COLUMNS)];
            let mut pixels: Vec<u8> = (0..3 * SIZE[0] * SIZE[1]).map(|_| 60 + random(60) as u8).collect();
            for row in top..top + SIDE {
                for column in left..left + SIDE {
                    pixels[3 * (row * SIZE[1] + column) + channel] = 250;
                }
            }
            let file = folder.join(class).join(format!("{index}.png"));
            write_png(&file, SIZE, png::ColorType::Rgb, &pixels);
            found.push((file, [top, left]));
        }
    }
    found
}

fn pixels(file: &Path) -> Vec<u8> {
    let mut reader =
        png::Decoder::new(std::io::BufReader::new(fs::File::open(file).unwrap())).read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    assert_eq!(([info.height as usize, info.width as usize], info.color_type), (SIZE, png::ColorType::Rgb));
    pixels
}

/// Row and column of the middle of the most heat: colours become lighter with it, and lie over the photograph by halves.
fn hottest(explained: &[u8], photograph: &[u8]) -> [usize; 2] {
    let light = |place: usize| -> i32 {
        let channels = 3 * place..3 * place + 3;
        channels.map(|at| 2 * i32::from(explained[at]) - i32::from(photograph[at])).sum()
    };
    // What was cut off has no colour over it.
    let is_seen = |place: &usize| explained[3 * place..3 * place + 3] != photograph[3 * place..3 * place + 3];
    let light: Vec<(usize, i32)> =
        (0..SIZE[0] * SIZE[1]).filter(is_seen).map(|place| (place, light(place))).collect();
    let most = light.iter().map(|(_, light)| *light).max().unwrap();
    let hottest: Vec<usize> = light.iter().filter(|of| of.1 >= most - 4).map(|of| of.0).collect();
    let mean = |of: fn(usize) -> usize| hottest.iter().map(|&place| of(place)).sum::<usize>() / hottest.len();
    [mean(|place| place / SIZE[1]), mean(|place| place % SIZE[1])]
}

fn explain(model: &Path, images: &Path, to: &Path, more: &[&str]) -> Vec<Value> {
    let own = ["predict", text(model), text(images), "--explain", text(to), "--effort", "heuristic"];
    let outcome = convoke(&[&own[..], &["--json", "-"], more].concat()).exits(0);
    assert!(outcome.stderr.contains(&format!("explain: {}", text(to))), "{}", outcome.stderr);
    outcome.json().as_array().unwrap().clone()
}

#[test]
fn heat_lies_on_what_tells_the_class() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, run, to, other, onnx] =
        ["photos", "run", "to", "other", "model.onnx"].map(|name| folder.path().join(name));
    let places = patches(&photos, 24);
    let train = ["train", text(&photos), "--output", text(&run), "--model", "resnet20", "--image-size", "32"];
    let how =
        ["--augment", "none", "--epochs", "8", "--batch-size", "8", "--lr", "0.003", "--effort", "heuristic"];
    convoke(&[&train[..], &how].concat()).exits(0);
    let weights = fs::read(run.join("best.safetensors")).unwrap();

    let found = explain(&run, &photos, &to, &[]);
    assert_eq!(fs::read(run.join("best.safetensors")).unwrap(), weights);
    assert_eq!((found.len(), contents(&to).len()), (72, 72));
    let mut hits = 0;
    for image in &found {
        let photograph = Path::new(image["image"].as_str().unwrap());
        let explained = Path::new(image["explanation"].as_str().unwrap());
        assert_eq!(explained.strip_prefix(&to).unwrap(), photograph.strip_prefix(&photos).unwrap());
        let [row, column] = hottest(&pixels(explained), &pixels(photograph));
        let (_, [top, left]) = places.iter().find(|(file, _)| file == photograph).unwrap();
        // The model tells places apart that are 5 pixels wide.
        let near = |at: usize, first: usize| (at + 5 >= first) && at < first + SIDE + 5;
        hits += usize::from(near(row, *top) && near(column, *left));
    }
    assert!(hits >= 65, "only {hits} of 72 images have the most heat at the patch");

    // In other batches, mirrored too, and from an exported file, they are the same.
    convoke(&["export", text(&run), "--to", text(&onnx)]).exits(0);
    for (model, more) in [(&run, &["--batch-size", "5", "--flip"][..]), (&onnx, &["--threads", "1"])] {
        let images = explain(model, &photos.join("red"), &other, more);
        assert_eq!(images.len(), 24);
        for image in images {
            let explained = Path::new(image["explanation"].as_str().unwrap());
            let same = to.join("red").join(explained.file_name().unwrap());
            let apart = |(a, b): (&u8, &u8)| a.abs_diff(*b);
            let apart = pixels(explained).iter().zip(&pixels(&same)).map(apart).max();
            assert!(apart <= Some(2), "{apart:?} {image}");
        }
    }

    // A page shows them of the images with the highest loss, and of those with the lowest.
    let page = folder.path().join("page.html");
    let evaluate = ["evaluate", text(&run), text(&photos), "--split", "all", "--effort", "heuristic"];
    convoke(&[&evaluate[..], &["--report", text(&page), "--explain"]].concat()).exits(0);
    let page = fs::read_to_string(page).unwrap();
    let count = |needle: &str| page.matches(needle).count();
    assert_eq!((count("<img "), count("alt=\"evidence for ")), (72, 36));
    assert_eq!(count("(Grad-CAM)"), 1);
    convoke(&[&evaluate[..], &["--explain"]].concat()).check(2, &["--report"]).unwrap();

    // What would be written over something else, and what is no image.
    let refused = |images: &[&Path], to: &Path, needle: &str| {
        let images = images.iter().map(|image| text(image));
        let own: Vec<&str> = ["predict", text(&run)].into_iter().chain(images).collect();
        convoke(&[&own[..], &["--explain", text(to)]].concat()).check(2, &["--explain", needle]).unwrap();
    };
    let before = contents(&photos);
    let [red, blue] = ["red", "blue"].map(|class| photos.join(class));
    refused(&[&red, &blue], &folder.path().join("both"), "two images would have the file");
    refused(&[&photos], &photos, "would be overwritten");
    assert_eq!(contents(&photos), before);
    let broken = folder.path().join("broken.jpg");
    fs::write(&broken, b"\xff\xd8\xff").unwrap();
    let whole = red.join("0.png");
    let both = ["predict", text(&run), text(&broken), text(&whole), "--explain", text(&other)];
    let outcome = convoke(&both);
    outcome.check(1, &["broken.jpg", "1 of 2 images could not be read"]).unwrap();
    assert!(outcome.stdout.contains("explanation ") && other.join("0.png").is_file(), "{}", outcome.stdout);
    assert!(!other.join("broken.png").exists());
    convoke(&[&both[..4], &["--explain", text(&broken.join("below"))]].concat())
        .check(1, &["--explain"])
        .unwrap();
}

#[test]
fn the_most_likely_of_several_labels_is_explained() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, run, to] = ["photos", "run", "to"].map(|name| folder.path().join(name));
    with_table(&photos, "above,below", |is_sky, _| format!("{},{}", u8::from(is_sky), u8::from(!is_sky)));
    let train = ["train", text(&photos), "--output", text(&run), "--image-size", "32", "--steps", "2"];
    convoke(&[&train[..], &["--batch-size", "4", "--effort", "heuristic"]].concat()).exits(0);
    let found = explain(&run, &photos, &to, &[]);
    assert!(found.len() == 20 && found.iter().all(|image| image["labels"].is_array()), "{found:?}");
    assert_eq!(contents(&to).len(), 20);
    // Of images of 32 x 32, its last maps have few places.
    convoke(&["predict", text(&run), text(&photos), "--explain", text(&to)])
        .check(0, &["tells 2x2 places apart", "--image-size"])
        .unwrap();
    let page = folder.path().join("page.html");
    convoke(&["evaluate", text(&run), text(&photos), "--report", text(&page), "--explain"])
        .check(2, &["predict --explain DIR"])
        .unwrap();
}

#[test]
fn models_without_evidence_for_a_class_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, data, run, pixels, onnx, to] =
        ["photos", "data", "run", "pixels", "linear.onnx", "to"].map(|name| folder.path().join(name));
    let image = photos.join("sky/0.png");
    let refused = |model: &Path, needles: &[&str]| {
        let own = ["predict", text(model), text(&image), "--explain", text(&to)];
        convoke(&own).check(2, &[&["--explain"], needles].concat()).unwrap();
        assert!(!to.exists(), "a refused command left a folder");
    };
    with_table(&photos, "height", |is_sky, index| if is_sky { index } else { 50 - index }.to_string());
    let few = ["--steps", "1", "--batch-size", "2", "--effort", "heuristic"];
    let train = ["train", text(&photos), "--output", text(&run), "--image-size", "32"];
    convoke(&[&train[..], &few].concat()).exits(0);
    refused(&run, &["predicts numbers", "--csv FILE"]);

    scenes(&data);
    let train = ["train", text(&data), "--output", text(&pixels)];
    convoke(&[&train[..], &few].concat()).exits(0);
    refused(&pixels, &["a class for each pixel", "--masks DIR"]);

    let weight = Array::floats([0.5; 2 * 48]).reshaped(&[48, 2]).unwrap();
    let nodes: [(Op, &[&str]); 3] = [
        (Op::Constant(weight), &[]),
        (Op::Flatten(Along { axis: 1 }), &["x"]),
        (Op::Gemm(Gemm::default()), &["y1", "y0"]),
    ];
    file(&onnx, &[0, 3, 4, 4], &nodes);
    convoke(&["predict", text(&onnx), text(&image)]).exits(0);
    refused(&onnx, &["the model has no maps"]);
}
