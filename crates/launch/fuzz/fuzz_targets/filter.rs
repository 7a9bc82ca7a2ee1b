//! Any filter gives slots of the pool, each at most once, or an error.
#![no_main]

use ferrospeed_launch::filter;
use ferrospeed_launch::hostfile::HostPool;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|filters: (&str, &str)| {
    let pool: HostPool = [("a".to_owned(), 4), ("b".to_owned(), 1), ("fe80::1".to_owned(), 2)].into();
    let Ok(active) = filter::apply(&pool, filters.0, filters.1) else { return };
    for (host, slots) in &active {
        let mut distinct = slots.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), slots.len());
        assert!(slots.iter().all(|slot| *slot < pool[host]));
    }
});
