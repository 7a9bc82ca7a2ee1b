//! What a program's `main` returns.

use std::error::Error;
use std::fmt;

/// Any error, shown as its message when `main` returns it: Rust prints errors of `main` in their debugging form, which of
/// other types is a dump of their fields.
///
/// ```
/// fn main() -> Result<(), ferrospeed_engine::Failure> {
///     let batch: u64 = "8".parse()?;
///     assert_eq!(batch, 8);
///     Ok(())
/// }
/// ```
pub struct Failure(Box<dyn Error + Send + Sync>);

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut said = self.0.to_string();
        f.write_str(&said)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let message = error.to_string();
            // Messages often end with that of their cause.
            if !said.contains(&message) {
                write!(f, "\n  because {message}")?;
                said = message;
            }
            cause = error.source();
        }
        Ok(())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure(error.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EngineError;

    #[test]
    fn a_failure_reads_as_its_message_in_the_form_that_main_prints() {
        let error = EngineError::Order { call: "backward", why: "call forward first" };
        assert_eq!(format!("{:?}", Failure::from(error)), "backward: call forward first");
        let error = std::io::Error::other(EngineError::Order { call: "step", why: "too early" });
        assert_eq!(format!("{:?}", Failure::from(error)), "step: too early");
        assert_eq!(format!("{:?}", Failure::from("the loss did not fall")), "the loss did not fall");
    }
}
