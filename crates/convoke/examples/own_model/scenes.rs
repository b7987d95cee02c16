//! Scenes of discs and squares with the class of each pixel. No scene is stored: each is drawn when it is asked for, in one of
//! two sizes, and resized to the smaller one.

use std::error::Error;

use convoke::nn::data::{Dataset, DatasetInfo, Pixels, Sample, Target, Targets};

/// The `len` scenes from number `first` on.
pub(crate) struct Scenes {
    info: DatasetInfo,
    seed: u64,
    first: usize,
    len: usize,
}

/// Height and width of the scenes, in turn.
const SIZES: [[usize; 2]; 2] = [[48, 64], [72, 96]];

impl Scenes {
    /// Channels, height and width that all scenes are resized to.
    pub(crate) const SHAPE: [usize; 3] = [3, 48, 64];
    /// Ground, disc, square.
    pub(crate) const CLASSES: usize = 3;

    pub(crate) fn new(seed: u64, first: usize, len: usize) -> Scenes {
        Scenes { info: Scenes::info(), seed, first, len }
    }

    pub(crate) fn info() -> DatasetInfo {
        let targets = Targets::Pixels { ignore: None };
        DatasetInfo::of_noise("scenes", Scenes::SHAPE, Scenes::CLASSES, targets)
    }
}

impl Dataset for Scenes {
    fn info(&self) -> &DatasetInfo {
        &self.info
    }

    fn len(&self) -> usize {
        self.len
    }

    fn sample(&self, index: usize, seed: Option<u64>) -> Result<Sample<'_>, Box<dyn Error + Send + Sync>> {
        let index = self.first + index;
        let mut random = Random(self.seed ^ (index as u64) << 20);
        // In training, the light differs in each epoch.
        let light = seed.map_or(0.0, |seed| Random(seed).uniform() - 0.5);
        let [height, width] = SIZES[index % 2];
        let shapes = [(); 4].map(|()| Shape::drawn(&mut random));
        // The larger scenes are resized to the smaller size by taking the nearest pixels.
        let [channels, rows, columns] = Scenes::SHAPE;
        let classes: Vec<u8> = (0..rows * columns)
            .map(|place| {
                let (row, column) = (place / columns * height / rows, place % columns * width / columns);
                let place = [row as f64 / height as f64, column as f64 / width as f64];
                shapes.iter().rev().find(|shape| shape.covers(place)).map_or(0, |shape| shape.class)
            })
            .collect();
        let mut pixel = |class: u8, channel: usize| {
            let colour = [[0.3, 0.4, 0.3], [0.7, 0.3, 0.2], [0.2, 0.4, 0.8]][usize::from(class)][channel];
            (255.0 * (colour + 0.2 * light + 0.3 * (random.uniform() - 0.5))).clamp(0.0, 255.0) as u8
        };
        let image = (0..channels).flat_map(|channel| classes.iter().map(move |&class| (class, channel)));
        let image = image.map(|(class, channel)| pixel(class, channel)).collect();
        Ok(Sample { image: Pixels::Bytes(image), target: Target::Bytes(classes.into()) })
    }
}

/// A disc or a square, in parts of the scene's height and width.
struct Shape {
    class: u8,
    centre: [f64; 2],
    radius: f64,
}

impl Shape {
    fn drawn(random: &mut Random) -> Shape {
        let class = 1 + u8::from(random.uniform() < 0.5);
        Shape { class, centre: [random.uniform(), random.uniform()], radius: 0.06 + 0.14 * random.uniform() }
    }

    fn covers(&self, [row, column]: [f64; 2]) -> bool {
        let (down, right) = (row - self.centre[0], column - self.centre[1]);
        match self.class {
            1 => down * down + right * right < self.radius * self.radius,
            _ => down.abs().max(right.abs()) < self.radius,
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood, 2014).
struct Random(u64);

impl Random {
    /// In [0, 1).
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
