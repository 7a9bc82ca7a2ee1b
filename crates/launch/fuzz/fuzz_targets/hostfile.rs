//! Any text is a hostfile or an error, and what is accepted can be encoded and read back.
#![no_main]

use ferrospeed_launch::{filter, hostfile, world_info};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(pool) = hostfile::parse(text) else { return };
    if pool.values().map(|&slots| u64::from(slots)).sum::<u64>() > 1 << 20 {
        return;
    }
    let world = filter::apply(&pool, "", "").expect("no filter keeps everything");
    assert_eq!(world_info::decode(&world_info::encode(&world)).expect("our own encoding"), world);
});
