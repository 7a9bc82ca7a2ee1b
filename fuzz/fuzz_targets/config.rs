//! The configuration reader on any bytes: read, checked, resolved, written out and read again.
#![no_main]

use ferrospeed_config::{AutoValues, Config};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = Config::from_base64(text);
    let Ok(unresolved) = Config::from_str("fuzz", text) else { return };
    let _ = unresolved.report().to_string();
    for ranks in [1, 3, 8] {
        let ranks = ranks.try_into().expect("a positive number of ranks");
        if let Ok((config, _)) = unresolved.resolve(ranks, &AutoValues::new()) {
            let again = Config::from_value("again", &config.to_json()).expect("our own text is readable");
            let (again, _) = again.resolve(ranks, &AutoValues::new()).expect("a resolved configuration is valid");
            assert_eq!(config.canonical_hash(), again.canonical_hash());
        }
    }
});
