//! The gradients of every operation agree with central differences, in both memory formats, on buffers of NaN.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::cases::{ALIASES, OPERATIONS, Size};
use crate::common::{FORMATS, device};
use convoke_autograd::{GradCheck, MemoryFormat, gradcheck};
use convoke_testkit::Failures;

/// Differences of smooth functions of values around one, in f64: steps of 1e-6 leave errors of about 1e-9 (rounding)
/// and 1e-11 (curvature). Hence much less is allowed than by default.
const EXACT: GradCheck = GradCheck { eps: 1e-6, atol: 1e-6, rtol: 1e-5, projections: None, seed: 0x5eed };

/// Checks every case of every operation.
fn check_all(size: Size, formats: &[MemoryFormat], options: &GradCheck) {
    let device = device();
    let mut failures = Failures::new(format!("gradcheck of {size:?} cases"));
    for operation in OPERATIONS.iter().filter(|o| {
        std::env::var("ONLY").is_err() || std::env::var("ONLY").unwrap().split(",").any(|f| f == o.file)
    }) {
        for &format in formats {
            let cases = operation.cases(&device, format, size);
            assert!(!cases.is_empty(), "{} has no {size:?} case", operation.name);
            for case in cases {
                failures.run(format!("{} {format} {}", operation.name, case.name), || {
                    let report = gradcheck(&case.function, &case.inputs, options)
                        .map_err(|error| error.to_string())?;
                    let elements: usize = case.inputs.iter().map(|input| input.len()).sum();
                    let expected = options.projections.map_or(elements, |count| count * case.inputs.len());
                    match report.compared == expected {
                        true => Ok(()),
                        false => Err(format!("compared {} of {expected} derivatives", report.compared)),
                    }
                });
            }
        }
    }
    failures.finish();
}

#[test]
fn every_element_in_contiguous_format() {
    check_all(Size::Small, &FORMATS[..1], &EXACT);
}

#[test]
fn every_element_in_channels_last() {
    check_all(Size::Small, &FORMATS[1..], &EXACT);
}

#[test]
fn random_projections() {
    check_all(Size::Small, &FORMATS, &GradCheck { seed: 7, ..GradCheck::fast() });
}

/// Large enough that kernels split their work between threads. A loss summed over thousands of positions has the
/// rounding error of its size, so the steps are larger.
#[test]
fn random_projections_of_large_inputs() {
    check_all(Size::Large, &FORMATS, &GradCheck { eps: 1e-5, projections: Some(2), ..EXACT });
}

/// `(file, function)` of each public function in `src/ops` that returns a tensor.
fn operations_in_source() -> BTreeSet<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops");
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let source = if path.is_dir() { path.join("mod.rs") } else { path };
        let source = std::fs::read_to_string(source).unwrap();
        let before = found.len();
        for function in source.split("pub fn ").skip(1) {
            let signature = function.split('{').next().unwrap();
            if signature.contains("-> Result<Tensor>") || signature.contains("-> Result<(Tensor,") {
                let name = signature.split(['(', '<']).next().unwrap();
                found.insert((file.clone(), name.to_owned()));
            }
        }
        assert!(found.len() > before || file == "mod", "{file}.rs has no public operation");
    }
    found
}

#[test]
fn every_operation_of_the_source_has_cases() {
    let checked = OPERATIONS.iter().map(|operation| (operation.file.to_owned(), operation.name.to_owned()));
    let aliases = ALIASES.iter().map(|&(alias, name)| {
        let operation = OPERATIONS.iter().find(|operation| operation.name == name).unwrap();
        (operation.file.to_owned(), alias.to_owned())
    });
    assert_eq!(
        checked.chain(aliases).collect::<BTreeSet<_>>(),
        operations_in_source(),
        "left: tests/common/cases.rs, right: src/ops; a new operation needs a line in OPERATIONS"
    );
}
