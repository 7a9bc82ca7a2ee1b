//! A test that cannot run here says so, and is counted.
//!
//! [`skip`] prints "skipped: REASON". Where `FERROSPEED_SKIPS` names a file, it also appends a line there, so that a
//! check of the whole repository can end with how many tests did not run and why.

use std::fs::OpenOptions;
use std::io::Write;

/// The environment variable that names the file to which skips are appended.
pub const SKIPS_VARIABLE: &str = "FERROSPEED_SKIPS";

/// The name of the test binary, less the hash that cargo adds.
fn binary() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    name.rsplit_once('-').map_or(name.clone(), |(bare, _)| bare.to_owned())
}

/// Says that the test which runs on this thread is skipped, and why. The caller returns.
///
/// # Panics
/// When the file of skips is named and cannot be written: a skip that nobody counts is a hole.
pub fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
    let Some(path) = std::env::var_os(SKIPS_VARIABLE).filter(|path| !path.is_empty()) else { return };
    let test = format!("{} {}", binary(), std::thread::current().name().unwrap_or("?"));
    let file = OpenOptions::new().create(true).append(true).open(&path);
    // One write, so that lines of tests that run at the same time do not mix.
    let written = file.and_then(|mut file| file.write_all(format!("{reason}\t{test}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
