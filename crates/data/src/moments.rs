//! Mean and standard deviation of the bytes of each channel.

/// How often each byte occurs in each channel.
#[derive(Clone, Debug)]
pub(super) struct Moments {
    counts: Vec<[u64; 256]>,
}

impl Moments {
    pub(super) fn new(channels: usize) -> Moments {
        Moments { counts: vec![[0; 256]; channels] }
    }

    /// Adds images in planes: N x C x (plane) bytes.
    pub(super) fn add_planes(&mut self, pixels: &[u8], plane: usize) {
        let channels = self.counts.len();
        for (index, plane) in pixels.chunks(plane).enumerate() {
            let counts = &mut self.counts[index % channels];
            plane.iter().for_each(|&byte| counts[usize::from(byte)] += 1);
        }
    }

    /// Adds pixels of C bytes.
    #[cfg(feature = "images")]
    pub(super) fn add_pixels(&mut self, pixels: &[u8]) {
        for pixel in pixels.chunks_exact(self.counts.len()) {
            let channels = self.counts.iter_mut().zip(pixel);
            channels.for_each(|(counts, &byte)| counts[usize::from(byte)] += 1);
        }
    }

    /// Adds what another has counted.
    #[cfg(feature = "images")]
    pub(super) fn add(&mut self, other: &Moments) {
        for (counts, others) in self.counts.iter_mut().zip(&other.counts) {
            counts.iter_mut().zip(others).for_each(|(count, other)| *count += other);
        }
    }

    /// Mean and standard deviation of each channel, scaled to 0..1, computed in f64. A channel without contrast has a standard
    /// deviation of 1, so that normalising it gives 0.
    pub(super) fn mean_and_std(&self) -> (Vec<f32>, Vec<f32>) {
        let moments = self.counts.iter().map(|counts| {
            let all = counts.iter().sum::<u64>() as f64;
            let values =
                || counts.iter().enumerate().map(|(byte, &count)| (byte as f64 / 255.0, count as f64));
            let mean = values().map(|(value, count)| value * count).sum::<f64>() / all;
            let variance = values().map(|(value, count)| (value - mean).powi(2) * count).sum::<f64>() / all;
            let one_value = counts.iter().filter(|&&count| count > 0).count() == 1;
            (mean as f32, if one_value { 1.0 } else { variance.sqrt() as f32 })
        });
        moments.unzip()
    }
}
