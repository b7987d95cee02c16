//! Times loading of a folder of photographs alone, as training varies them, for comparison with another framework
//! (`tools/peers/loading.py`). Prints the images a second of one pass.
//!
//! ```text
//! cargo run --release --example loading_times -- DIR [WORKERS] [SIZE]
//! ```

use std::path::Path;
use std::time::Instant;

use convoke::nn::data::photos::{FolderOptions, PhotoAugmentation, Preparation, folder};
use convoke::nn::data::{Augmentation, Loader, Request, silent};

const BATCH: usize = 32;
const AHEAD: usize = 3;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("name a folder of photographs")?;
    let workers: usize = args.next().map_or(Ok(2), |text| text.parse())?;
    let size: usize = args.next().map_or(Ok(224), |text| text.parse())?;
    let options = FolderOptions {
        preparation: Preparation { size: [size, size], ..Preparation::default() },
        // A random part, half of them mirrored: what the peer does.
        augmentation: PhotoAugmentation {
            brightness: 0.0,
            contrast: 0.0,
            saturation: 0.0,
            ..PhotoAugmentation::default()
        },
        validation_share: 0.01,
        ..FolderOptions::default()
    };
    let data = folder(Path::new(&dir), &options, &silent)?.train;
    let views = Augmentation::default().views(1, 0);
    let order: Vec<u32> = (0..data.class_counts().iter().sum::<usize>() as u32).collect();
    let requests: Vec<Request> =
        order.chunks(BATCH).map(|chunk| Request { samples: chunk.to_vec(), views: Some(views) }).collect();
    let loader = Loader::new(data, workers)?;
    let mut images = vec![0.0; BATCH * 3 * size * size];
    let start = Instant::now();
    for (index, request) in requests.iter().enumerate() {
        requests[index..].iter().take(AHEAD).for_each(|request| loader.load_ahead(request));
        loader.load(request, &mut images[..request.samples.len() * 3 * size * size])?;
    }
    println!("{:.1}", order.len() as f64 / start.elapsed().as_secs_f64());
    Ok(())
}
