//! The hostfile reader on any text.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = ferrospeed_launch::hostfile::parse(text);
});
