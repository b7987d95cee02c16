//! Reads a file of convolution problems: the problems survive being printed and read again.

#![no_main]

use convoke_fuzz::check_said;
use convoke_kernels::conv::parse_suite;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match parse_suite(text) {
        Ok(problems) => {
            let printed: String = problems.iter().map(|problem| format!("{problem}  # again\n")).collect();
            assert_eq!(parse_suite(&printed), Ok(problems), "printed as {printed}");
        }
        Err(error) => check_said(error),
    }
});
