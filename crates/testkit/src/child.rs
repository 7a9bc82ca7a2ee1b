//! A test that needs a process of its own (a signal, a limit, another environment) starts its executable again.
//!
//! ```no_run
//! # use ferrospeed_testkit::child;
//! let output = child::alone(module_path!(), "a_limit_is_named").env("LIMITED", "1").output().unwrap();
//! child::assert_passed(&output);
//! ```

use std::process::{Command, Output};

/// The name by which the test's executable knows a test: of its `module_path!()` and its function.
pub fn name(module: &str, function: &str) -> String {
    match module.split_once("::") {
        Some((_executable, module)) => format!("{module}::{function}"),
        None => function.to_owned(),
    }
}

/// The arguments that make a test's executable run this one test and nothing else.
pub fn arguments(module: &str, function: &str) -> [String; 4] {
    ["--exact".into(), name(module, function), "--nocapture".into(), "--test-threads=1".into()]
}

/// This test alone, in a new process of the executable that runs now.
///
/// # Panics
/// When the system does not say which executable that is.
pub fn alone(module: &str, function: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test's own executable"));
    command.args(arguments(module, function));
    command
}

/// Whether this process is the test's own, for one that measures what its process or the children of it hold. Where others run beside
/// it, it is started again in a process of its own, which has to pass.
///
/// ```no_run
/// # use ferrospeed_testkit::child;
/// if !child::has_process_alone(module_path!(), "what_this_process_holds_is_measured") {
///     return;
/// }
/// ```
///
/// # Panics
/// When the other process does not pass.
pub fn has_process_alone(module: &str, function: &str) -> bool {
    const ALONE: &str = "FERROSPEED_TEST_ALONE";
    let own = name(module, function);
    if std::env::var(ALONE).is_ok_and(|test| test == own) {
        return true;
    }
    let output = alone(module, function).env(ALONE, own).output().expect("the test's own executable starts");
    assert_passed(&output);
    false
}

/// That one test ran and passed: a name that no test has ends well too.
///
/// # Panics
/// When it did not, with what it said.
pub fn assert_passed(output: &Output) {
    let [out, error] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success() && out.contains("1 passed"), "{}: {out}{error}", output.status);
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_name_is_what_the_executable_lists() {
        let mut listing = super::alone(module_path!(), "a_name_is_what_the_executable_lists");
        let listed = listing.arg("--list").output().unwrap();
        let expected =
            format!("{}: test", super::name(module_path!(), "a_name_is_what_the_executable_lists"));
        assert!(String::from_utf8_lossy(&listed.stdout).lines().any(|line| line == expected), "{listed:?}");
        assert_eq!(super::name("it", "top"), "top");
    }
}
