//! Which files of a folder are for validation when the folder does not say.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::super::DataError;
use super::geometry::setting;
use super::measure::Skipped;

/// How many files of a group are for validation, and which.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Split {
    pub(super) share: f64,
    pub(super) seed: u64,
}

impl Split {
    pub(super) fn check(&self) -> Result<(), DataError> {
        match self.share > 0.0 && self.share < 1.0 {
            true => Ok(()),
            false => Err(setting("validation share", "above 0 and below 1", self.share)),
        }
    }

    /// Whether each file of a group is for validation. Of two files or more, at least one is and one is not.
    ///
    /// Files are ranked by a hash of seed and name, so the order of files changes nothing, and one more file changes at most one
    /// other.
    pub(super) fn of(&self, files: &[&Path]) -> Vec<bool> {
        let mut is_validation = vec![false; files.len()];
        if files.len() < 2 {
            return is_validation;
        }
        let count = (self.share * files.len() as f64).round() as usize;
        let mut ranks: Vec<_> = files.iter().enumerate().map(|(at, file)| (self.rank(file), at)).collect();
        ranks.sort_unstable();
        for (_, at) in &ranks[..count.clamp(1, files.len() - 1)] {
            is_validation[*at] = true;
        }
        is_validation
    }

    /// Divides files into those for training and those for validation, which `is_validation` tells; `None` if there are none of the
    /// latter.
    pub(super) fn divided<T>(files: Vec<T>, is_validation: &[bool]) -> Option<(Vec<T>, Vec<T>)> {
        let mut is_validation = is_validation.iter();
        let (validation, train): (Vec<T>, Vec<T>) =
            files.into_iter().partition(|_| is_validation.next() == Some(&true));
        (!validation.is_empty()).then_some((train, validation))
    }

    fn rank(&self, file: &Path) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(b"validation/1");
        hash.update(self.seed.to_le_bytes());
        for part in file {
            // Whatever separates the names on this system.
            hash.update(b"/");
            hash.update(part.as_encoded_bytes());
        }
        hash.finalize().into()
    }
}

/// What a set trains with and what it is validated with, each with the images that were left out of it.
///
/// Both are checked if the folder has both; else the images that are left after the check are divided.
pub(super) fn train_and_validation<T>(
    train: Vec<T>,
    validation: Option<Vec<T>>,
    checked: impl Fn(Vec<T>) -> Result<(Vec<T>, Skipped), DataError>,
    divided: impl FnOnce(Vec<T>) -> Result<(Vec<T>, Vec<T>), DataError>,
) -> Result<[(Vec<T>, Skipped); 2], DataError> {
    let (train, skipped) = checked(train)?;
    match validation {
        Some(validation) => Ok([(train, skipped), checked(validation)?]),
        None => {
            let (train, validation) = divided(train)?;
            Ok([(train, skipped), (validation, Skipped::new())])
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;

    fn chosen<'a>(split: &Split, files: &[&'a Path]) -> HashSet<&'a Path> {
        let chosen = split.of(files).into_iter().zip(files).filter(|(chosen, _)| *chosen);
        chosen.map(|(_, file)| *file).collect()
    }

    proptest! {
        #[test]
        fn the_share_is_kept_and_the_order_changes_nothing(
            share in 0.001_f64..0.999,
            seed in any::<u64>(),
            count in 0_usize..200,
            turn in any::<usize>(),
        ) {
            let names: Vec<PathBuf> = (0..count).map(|index| format!("cat/{index}.jpg").into()).collect();
            let mut files: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
            let split = Split { share, seed };
            prop_assert!(split.check().is_ok());
            let found = chosen(&split, &files);
            let ideal = (share * count as f64).round() as usize;
            let expected = if count < 2 { 0 } else { ideal.clamp(1, count - 1) };
            prop_assert_eq!(found.len(), expected);
            if count > 0 {
                files.rotate_left(turn % count);
                files.reverse();
                prop_assert_eq!(&chosen(&split, &files), &found);
                // One file less moves at most one other.
                let gone = files.pop().unwrap();
                let rest = chosen(&split, &files);
                let moved = rest.symmetric_difference(&found).filter(|file| **file != gone).count();
                prop_assert!(moved <= 1, "{} files moved", moved);
            }
        }
    }

    #[test]
    fn seeds_choose_other_files_and_all_equally_often() {
        let names: Vec<PathBuf> = (0..10).map(|index| format!("{index}.png").into()).collect();
        let files: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
        let mut counts = [0_usize; 10];
        for seed in 0..2000 {
            let split = Split { share: 0.2, seed };
            split
                .of(&files)
                .iter()
                .zip(&mut counts)
                .for_each(|(chosen, count)| *count += usize::from(*chosen));
        }
        // 400 each, with a standard error of 18.
        assert!(counts.iter().all(|count| count.abs_diff(400) < 100), "{counts:?}");
    }

    /// Fails when the choice changes: resumed runs would validate on what they have learnt from.
    #[test]
    fn the_choice_is_the_same_on_every_machine() {
        let names: Vec<PathBuf> = (0..8).map(|index| format!("dog/{index}.jpg").into()).collect();
        let files: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
        let of = |seed| {
            let chosen = Split { share: 0.25, seed }.of(&files);
            (0..8).filter(|index| chosen[*index]).collect::<Vec<_>>()
        };
        assert_eq!([of(1), of(2)], [[1, 4], [1, 5]]);
    }

    #[test]
    fn impossible_shares_are_refused() {
        for share in [0.0, 1.0, -0.5, f64::NAN] {
            let error = Split { share, seed: 1 }.check().unwrap_err().to_string();
            let expected = "data set of photographs: validation share: expected above 0 and below 1, found ";
            assert_eq!(error, format!("{expected}{share}"));
        }
    }
}
