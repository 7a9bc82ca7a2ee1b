//! Goes through every recorded case, and tells of all that failed at once.
//!
//! A test that stops at its first difference hides the others, and one that silently compared nothing passes. So a run
//! of cases counts them: at least one, and in the repository's own set exactly the number that the test knows.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::golden::Golden;

/// A run of cases under one name.
#[derive(Debug)]
pub struct Cases {
    what: String,
    compared: usize,
    failures: Vec<String>,
}

impl Cases {
    /// None yet. `what` names the file or folder they come from.
    pub fn of(what: impl Into<String>) -> Self {
        Cases { what: what.into(), compared: 0, failures: Vec::new() }
    }

    /// Runs one case; an assertion that fails in it is kept for [`Cases::finish`].
    pub fn check(&mut self, name: impl Display, compare: impl FnOnce()) {
        self.compared += 1;
        if let Err(panic) = catch_unwind(AssertUnwindSafe(compare)) {
            let message = panic.downcast_ref::<String>().map(String::as_str);
            let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked");
            self.failures.push(format!("{name}: {message}"));
        }
    }

    /// How many cases ran so far.
    pub fn compared(&self) -> usize {
        self.compared
    }

    /// Asserts that no case failed, and in the default set that there were exactly `known`. Another set may have none.
    ///
    /// # Panics
    /// With every failure.
    #[track_caller]
    pub fn finish(self, set: &Golden, known: usize) {
        let Cases { what, compared, failures } = self;
        assert!(
            failures.is_empty(),
            "{what}: {} of {compared} cases failed:\n- {}",
            failures.len(),
            failures.join("\n- ")
        );
        match set.is_default() {
            true => assert_eq!(compared, known, "{what}: the number of cases in the repository's set"),
            false if compared == 0 => eprintln!("golden: {what}: none of these cases is in this set"),
            false => {}
        }
        println!("{what}: {compared} cases compared");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::golden::golden;

    #[test]
    fn every_failure_is_told_not_only_the_first() {
        let outcome = catch_unwind(|| {
            let mut cases = Cases::of("some/file.json");
            for number in 0..4 {
                cases.check(number, || assert!(number % 2 == 0, "{number} is odd"));
            }
            cases.finish(&golden(), 4);
        });
        let message = *outcome.unwrap_err().downcast::<String>().unwrap();
        assert!(message.starts_with("some/file.json: 2 of 4 cases failed:"), "{message}");
        assert!(message.contains("1 is odd") && message.contains("3 is odd"), "{message}");
    }

    #[test]
    fn a_run_that_compared_too_few_cases_fails() {
        let outcome = catch_unwind(|| Cases::of("config").finish(&golden(), 1));
        assert!(outcome.is_err());
    }
}
