//! The `--include` and `--exclude` grammar on any text, against a small pool.
#![no_main]

use ferrospeed_launch::{filter, hostfile};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|filters: (&str, &str)| {
    let pool = hostfile::parse("worker-0 slots=4\nworker-1 slots=4\nworker-10 slots=2\n").expect("a plain hostfile");
    let (include, exclude) = filters;
    let _ = filter::apply(&pool, include, exclude);
});
