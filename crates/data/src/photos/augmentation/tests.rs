//! What is drawn: within bounds, evenly spread, the same on every machine.

use proptest::prelude::*;

use super::super::geometry::Preparation;
use super::super::photo::Photo;
use super::super::testing::{encode, scene};
use super::super::view;
use super::*;

/// All that there is.
fn everything() -> PhotoAugmentation {
    PhotoAugmentation { trivial_augment: true, erasing: 1.0, ..PhotoAugmentation::default() }
}

fn lies_in(window: &Window, [rows, columns]: [usize; 2]) -> bool {
    let sides = [(window.top, window.height, rows), (window.left, window.width, columns)];
    sides.iter().all(|&(first, count, size)| count > 0 && first + count <= size)
}

proptest! {
    #[test]
    fn parts_lie_inside_and_have_the_shape_that_is_asked_for(
        seed in any::<u64>(),
        from in (1_usize..900, 1_usize..900),
        size in (1_usize..300, 1_usize..300),
        scale in (0.01_f64..1.0, 0.0_f64..1.0),
    ) {
        let (from, size) = ([from.0, from.1], [size.0, size.1]);
        let scale = [scale.0, scale.0 + (1.0 - scale.0) * scale.1];
        let augmentation = PhotoAugmentation { scale: Some(scale), ..everything() };
        prop_assert!(augmentation.check().is_ok());
        let drawn = augmentation.draw(seed, from, size);
        prop_assert_eq!(&augmentation.draw(seed, from, size), &drawn);
        let window = drawn.window.unwrap();
        prop_assert!(lies_in(&window, from), "{window:?} in {from:?}");
        prop_assert!(drawn.erased.is_none_or(|window| lies_in(&window, size)), "{:?}", drawn.erased);
        if from.iter().all(|side| *side > 100) && size[0].abs_diff(size[1]) < size[0] / 4 {
            let ratio = window.width as f64 / window.height as f64 * size[0] as f64 / size[1] as f64;
            // Sides are rounded.
            let slack = 1.0 + 2.0 / window.width.min(window.height) as f64;
            prop_assert!(0.75 / slack < ratio && ratio < 4.0 / 3.0 * slack, "{ratio}");
        }
        // What is drawn for one use does not depend on the others.
        let less = PhotoAugmentation { scale: None, flip: false, brightness: 0.0, ..augmentation };
        let other = less.draw(seed, from, size);
        prop_assert!(!other.flipped && other.window.is_none());
        prop_assert_eq!((other.trivial, other.erased), (drawn.trivial, drawn.erased));
        let rest = drawn.jitter.iter().filter(|change| !matches!(change, Colour::Brightness(_)));
        prop_assert!(rest.eq(&other.jitter));
    }
}

#[test]
fn numbers_are_spread_evenly() {
    let draws = 4000;
    // Parts that fit whatever their shape.
    let augmentation = PhotoAugmentation { scale: Some([0.1, 0.5]), ..everything() };
    let drawn: Vec<_> = (0..draws).map(|seed| augmentation.draw(seed, [400, 400], [50, 50])).collect();
    let share = |what: &dyn Fn(&Drawn) -> bool| {
        drawn.iter().filter(|drawn| what(drawn)).count() as f64 / draws as f64
    };
    let window = |drawn: &Drawn| drawn.window.unwrap();
    let area = |drawn: &Drawn| (window(drawn).height * window(drawn).width) as f64 / 160_000.0;
    let factor = |drawn: &Drawn| {
        let factors = drawn.jitter.iter().find_map(|change| match change {
            Colour::Contrast(factor) => Some(*factor),
            _ => None,
        });
        factors.unwrap()
    };
    // The standard error of a share of a half is 0.008.
    for (what, found, expected) in [
        ("flips", share(&|drawn| drawn.flipped), 0.5),
        ("small areas", share(&|drawn| area(drawn) < 0.3), 0.5),
        ("upright parts", share(&|drawn| window(drawn).width < window(drawn).height), 0.5),
        ("upper halves", share(&|drawn| 2 * window(drawn).top < 400 - window(drawn).height), 0.5),
        ("left halves", share(&|drawn| 2 * window(drawn).left < 400 - window(drawn).width), 0.5),
        ("less contrast", share(&|drawn| factor(drawn) < 1.0), 0.5),
        ("contrast before all", share(&|drawn| matches!(drawn.jitter[0], Colour::Contrast(_))), 1.0 / 3.0),
        ("contrast behind all", share(&|drawn| matches!(drawn.jitter[2], Colour::Contrast(_))), 1.0 / 3.0),
        ("no change", share(&|drawn| drawn.trivial == Change::Nothing), 1.0 / 14.0),
        ("geometry", share(&|drawn| matches!(drawn.trivial, Change::Geometry(_))), 5.0 / 14.0),
        ("holes", share(&|drawn| drawn.erased.is_some()), 1.0),
    ] {
        assert!((found - expected).abs() < 0.04, "{what}: {found}, expected {expected}");
    }
    assert!(drawn.iter().all(|drawn| (0.6..=1.4).contains(&factor(drawn))));
}

/// Fails when what is drawn changes: resumed runs would no longer be the runs that they resume.
#[test]
fn draws_are_the_same_on_every_machine() {
    let drawn: Vec<Drawn> = (7..10).map(|seed| everything().draw(seed, [375, 500], [224, 224])).collect();
    let windows = drawn.iter().map(|drawn| {
        let Window { top, left, height, width } = drawn.window.unwrap();
        (top, left, height, width, drawn.flipped)
    });
    let windows: Vec<_> = windows.collect();
    assert_eq!(windows, [(195, 21, 145, 167, true), (138, 77, 192, 166, false), (0, 18, 323, 310, false)]);
    let colours = [
        [Colour::Saturation(1.1659698), Colour::Contrast(0.95708513), Colour::Brightness(1.1965939)],
        [Colour::Saturation(0.69590026), Colour::Brightness(0.9827431), Colour::Contrast(1.2422032)],
        [Colour::Brightness(1.1607448), Colour::Contrast(0.95093817), Colour::Saturation(0.6226439)],
    ];
    assert!(drawn.iter().map(|drawn| drawn.jitter.as_slice()).eq(colours.iter().map(|colours| &colours[..])));
    let trivial: Vec<Change> = drawn.iter().map(|drawn| drawn.trivial).collect();
    let expected = [Colour::Posterize(7), Colour::Contrast(1.759), Colour::Posterize(3)].map(Change::Colour);
    assert_eq!(trivial, expected);
    assert_eq!(drawn[1].erased, Some(Window { top: 84, left: 18, height: 92, width: 166 }));
    // And so are the images.
    let file = encode(&scene([60, 80], 5), image::ImageFormat::Png);
    let photo = Photo::decode(&file, std::path::Path::new("x")).unwrap();
    let preparation = Preparation { size: [16, 16], ..Preparation::default() };
    let sums: Vec<u64> = (0..6)
        .map(|seed| {
            let drawn = everything().draw(seed, photo.size(), [16, 16]);
            let image = view::image(&photo, &drawn, &preparation, &[0.5; 3]).unwrap();
            // A byte's place counts.
            image.iter().zip(1..).map(|(&byte, place)| u64::from(byte) * place).sum()
        })
        .collect();
    assert_eq!(sums, [5429760, 14959601, 39244871, 51945976, 39676932, 57860899]);
}

#[test]
fn without_augmentation_training_shows_what_evaluation_shows() {
    let none = PhotoAugmentation::none();
    assert_eq!(none.draw(3, [20, 30], [8, 8]), Drawn::nothing());
}

#[test]
fn narrow_images_give_the_largest_part_that_is_allowed() {
    // No part of a tenth of the area or more has an allowed shape.
    let augmentation = PhotoAugmentation { scale: Some([0.5, 1.0]), ..PhotoAugmentation::default() };
    let wide = augmentation.draw(1, [10, 1000], [32, 32]).window.unwrap();
    assert_eq!(wide, Window { top: 0, left: 493, height: 10, width: 13 });
    let high = augmentation.draw(1, [1000, 10], [32, 32]).window.unwrap();
    assert_eq!(high, Window { top: 493, left: 0, height: 13, width: 10 });
    // Relative to the shape of the result.
    let high = augmentation.draw(1, [1000, 10], [320, 32]).window.unwrap();
    assert_eq!(high, Window { top: 433, left: 0, height: 133, width: 10 });
    assert_eq!(augmentation.draw(1, [1, 1], [32, 32]).window.unwrap(), Window::whole([1, 1]));
}

#[test]
fn impossible_settings_are_refused() {
    let usual = PhotoAugmentation::default();
    for (augmentation, message) in [
        (
            PhotoAugmentation { scale: Some([0.5, 0.4]), ..usual },
            "scale: expected two shares of the area, above 0 and at most 1, the lesser first, found [0.5, 0.4]",
        ),
        (
            PhotoAugmentation { scale: Some([0.0, 1.0]), ..usual },
            "scale: expected two shares of the area, above 0 and at most 1, the lesser first, found [0.0, 1.0]",
        ),
        (
            PhotoAugmentation { ratio: [1.0, f64::INFINITY], ..usual },
            "ratio: expected two ratios above 0, the lesser first, found [1.0, inf]",
        ),
        (PhotoAugmentation { contrast: -0.1, ..usual }, "contrast: expected 0 or more, found -0.1"),
        (PhotoAugmentation { saturation: f64::NAN, ..usual }, "saturation: expected 0 or more, found NaN"),
        (PhotoAugmentation { erasing: 1.5, ..usual }, "erasing: expected a probability, 0 to 1, found 1.5"),
    ] {
        let error = augmentation.check().unwrap_err().to_string();
        assert_eq!(error, format!("data set of photographs: {message}"));
    }
}
