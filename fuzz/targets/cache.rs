//! Reads hostile tuning results, an export or a single result: sound results survive being written and read again, and nothing is
//! written outside the cache's folder.

#![no_main]

use std::fs;

use convoke_fuzz::{check_said, file, folder};
use convoke_kernels::Isa;
use convoke_kernels::tune::{Cache, Record};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, &[u8])| {
    let (import, bytes) = input;
    let place = folder().join("caches");
    let _ = fs::remove_dir_all(&place);
    fs::create_dir(&place).expect("a folder");
    let [first, second] = ["first", "second"].map(|name| Cache::new(place.join(name), Isa::PORTABLE));
    if import {
        if let Err(error) = first.import(&file("import.json", bytes)) {
            check_said(error);
            assert!(!first.root().exists(), "a refused import left something");
            return;
        }
    } else {
        let scope = first.root().join(first.scope());
        fs::create_dir_all(&scope).expect("a folder");
        fs::write(scope.join("given.json"), bytes).expect("a file");
    }
    let records = sound(&first);
    // A stored result is found again under its key.
    for record in &records {
        if let Err(error) = second.save(record) {
            check_said(error);
        } else {
            assert_eq!(second.load(&record.key).expect("it was stored").as_ref(), Some(record));
        }
    }
    let names = fs::read_dir(&place).expect("a folder").map(|entry| entry.expect("an entry").file_name());
    assert!(names.into_iter().all(|name| name == "first" || name == "second"));
    // An export is imported completely.
    if import {
        let export = folder().join("export.json");
        let count = first.export(&export).expect("it can be written");
        let third = Cache::new(place.join("third"), Isa::PORTABLE);
        assert_eq!(third.import(&export).expect("an export is sound"), [count, 0]);
        assert_eq!(sound(&third), records);
    }
});

fn sound(cache: &Cache) -> Vec<Record> {
    let entries = cache.entries().expect("it can be listed");
    let record = |entry: convoke_kernels::tune::Entry| entry.record.map_err(check_said).ok();
    entries.into_iter().filter_map(record).collect()
}
