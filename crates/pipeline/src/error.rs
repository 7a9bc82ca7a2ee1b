//! The one error of this crate.

/// What cannot be divided, scheduled or understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PipelineError {
    /// A partition method that does not exist.
    #[error("partition method '{method}' is not known: {}use uniform, parameters, type:REGEX, profile or memory", did_you_mean(*nearest))]
    UnknownMethod {
        /// What was asked for.
        method: String,
        /// What was perhaps meant.
        nearest: Option<&'static str>,
    },
    /// A regular expression that cannot be read.
    #[error("partition method 'type:{pattern}': {why}")]
    BadPattern {
        /// The expression.
        pattern: String,
        /// What is wrong with it.
        why: String,
    },
    /// A regular expression that no layer matches.
    #[error("partition method 'type:{pattern}': no layer has such a name; the layers are {layers}")]
    NoMatch {
        /// The expression.
        pattern: String,
        /// The names there are.
        layers: String,
    },
    /// A partition by time or memory of a layer that nobody measured.
    #[error(
        "layers are divided by what was measured of them, and '{0}' was not: measure them first, or use parameters"
    )]
    NotMeasured(String),
    /// Numbers of stages and micro-batches that make no schedule.
    #[error("schedule {schedule}: {why}")]
    Schedule {
        /// Which.
        schedule: &'static str,
        /// Why, and what would do.
        why: String,
    },
    /// A key of the configuration that makes no pipeline.
    #[error("{key}: {why}")]
    Key {
        /// Which.
        key: &'static str,
        /// Why, and what would do.
        why: String,
    },
    /// A schedule that is wrong: a bug, or one that was made by hand.
    #[error("the schedule is not valid: {0}")]
    Invalid(String),
    /// What a neighbour said of its tensors makes no sense.
    #[error("the description of tensors at a stage's boundary is not valid: {0}")]
    Boundary(String),
}

/// The name that is near enough to be meant.
pub(crate) fn nearest(given: &str, names: &[&'static str]) -> Option<&'static str> {
    let edits = |name: &&'static str| strsim::osa_distance(&given.to_lowercase(), name);
    let near = |name: &&&'static str| edits(name) * 5 <= 2 * name.len().max(given.len());
    // Nobody means one of a few words by a hundred letters.
    let is_word = given.len() <= 100;
    names.iter().filter(|_| is_word).filter(near).min_by_key(|name| edits(name)).copied()
}

/// The beginning of an advice.
pub(crate) fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| format!("did you mean '{name}'? Or "))
}

/// The result of everything here.
pub type Result<T, E = PipelineError> = std::result::Result<T, E>;
