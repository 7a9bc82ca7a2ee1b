//! `--num_nodes`: a number, or `MIN:MAX` for elastic jobs.

use crate::error::LaunchError;

/// How many nodes a job may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeCount {
    /// The number asked for; the fewest in an elastic job.
    pub min: u32,
    /// The most, where `MIN:MAX` was written.
    pub max: Option<u32>,
}

/// Parses a node count.
pub fn parse(text: &str, elastic: bool) -> Result<NodeCount, LaunchError> {
    let refuse = |reason| LaunchError::NodeCount { text: crate::error::shorten(text), reason };
    let number = |part: &str| part.trim().parse::<u32>().map_err(|_| refuse("not a whole number"));
    let parts: Vec<&str> = text.split(':').collect();
    match parts[..] {
        [count] => Ok(NodeCount { min: number(count)?, max: None }),
        [_, _] if !elastic => Err(refuse("MIN:MAX is only for elastic training; add --elastic_training")),
        [min, max] => {
            let (min, max) = (number(min)?, number(max)?);
            if min > max {
                return Err(refuse("MIN is larger than MAX"));
            }
            Ok(NodeCount { min, max: Some(max) })
        }
        _ => Err(refuse("write COUNT or MIN:MAX")),
    }
}
