//! Curriculum learning: how hard the samples are at a step (Li et al., "The stability-efficiency dilemma", 2022).
//!
//! What a difficulty means (a sequence length, a percentile of a metric) is the caller's business. A [`Curriculum`] is a
//! pure function of the step; a [`CurriculumScheduler`] follows it until the maximum is reached, and stays there.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{OptimError, Result};
use crate::pace::Growth;

/// A function from steps to difficulties.
pub type Custom = Arc<dyn Fn(u64) -> u64 + Send + Sync>;

/// How difficulty grows.
#[derive(Clone)]
pub enum Curriculum {
    /// `fixed_linear` and `fixed_root`.
    Growing(Growth),
    /// `fixed_discrete`: each difficulty holds up to its last step, the last one for ever.
    Stairs {
        /// One more than `last_steps`.
        difficulties: Vec<u64>,
        /// The last step of each difficulty but the last, rising.
        last_steps: Vec<u64>,
        /// Once reached, the difficulty stays.
        max: u64,
    },
    /// `custom`: the caller's function.
    Custom {
        /// The function.
        function: Custom,
        /// Once reached, the difficulty stays.
        max: u64,
    },
}

impl fmt::Debug for Curriculum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Curriculum::Growing(growth) => growth.fmt(f),
            Curriculum::Stairs { difficulties, last_steps, max } => {
                write!(f, "Stairs {{ {difficulties:?} until {last_steps:?}, max {max} }}")
            }
            Curriculum::Custom { max, .. } => write!(f, "Custom {{ max {max} }}"),
        }
    }
}

#[derive(Deserialize)]
struct Section {
    min_difficulty: u64,
    max_difficulty: u64,
    schedule_type: String,
    schedule_config: Option<Value>,
}

#[derive(Deserialize)]
struct Linear {
    total_curriculum_step: u64,
    difficulty_step: u64,
}

#[derive(Deserialize)]
struct Root {
    total_curriculum_step: u64,
    difficulty_step: u64,
    root_degree: f64,
}

#[derive(Deserialize)]
struct Discrete {
    difficulty: Vec<u64>,
    max_step: Vec<u64>,
}

impl Curriculum {
    /// From a section of the configuration (`curriculum_learning`, or one of `curriculum_metrics`). `custom` is the
    /// function of a `custom` schedule.
    pub fn from_section(section: &Value, custom: Option<Custom>) -> Result<Curriculum> {
        let fault = |why: String| OptimError::Section { section: "curriculum_learning", why };
        let read: Section =
            serde_json::from_value(section.clone()).map_err(|error| fault(error.to_string()))?;
        let (min, max) = (read.min_difficulty, read.max_difficulty);
        let within = read.schedule_config.unwrap_or(Value::Null);
        let unreadable =
            |error: serde_json::Error| fault(format!("schedule_config of {}: {error}", read.schedule_type));
        let curriculum = match read.schedule_type.as_str() {
            "fixed_linear" => {
                let Linear { total_curriculum_step: steps, difficulty_step: multiple } =
                    serde_json::from_value(within).map_err(unreadable)?;
                Curriculum::Growing(Growth { min, max, steps, multiple, root_degree: 1.0 })
            }
            "fixed_root" => {
                let Root { total_curriculum_step: steps, difficulty_step: multiple, root_degree } =
                    serde_json::from_value(within).map_err(unreadable)?;
                Curriculum::Growing(Growth { min, max, steps, multiple, root_degree })
            }
            "fixed_discrete" => {
                let Discrete { difficulty, max_step } = serde_json::from_value(within).map_err(unreadable)?;
                if max_step.is_empty() || difficulty.len() != max_step.len() + 1 {
                    return Err(fault(format!(
                        "fixed_discrete needs one difficulty more than max_step, and two at least; there are {} and {}",
                        difficulty.len(),
                        max_step.len()
                    )));
                }
                if !max_step.is_sorted() {
                    return Err(fault(format!("max_step must rise, it is {max_step:?}")));
                }
                Curriculum::Stairs { difficulties: difficulty, last_steps: max_step, max }
            }
            "custom" => match custom {
                Some(function) => Curriculum::Custom { function, max },
                None => {
                    return Err(fault(
                        "schedule_type custom needs a function that gives the difficulty".into(),
                    ));
                }
            },
            other => {
                return Err(fault(format!(
                    "unknown schedule_type '{other}': there are fixed_linear, fixed_root, fixed_discrete and custom"
                )));
            }
        };
        match &curriculum {
            Curriculum::Growing(growth) => match growth.flaw() {
                Some((what, why)) => Err(fault(format!("{what} is wrong: {why}"))),
                None => Ok(curriculum),
            },
            _ => Ok(curriculum),
        }
    }

    /// The difficulty at a step, whatever came before.
    pub fn difficulty(&self, step: u64) -> u64 {
        match self {
            Curriculum::Growing(growth) => growth.at(step),
            Curriculum::Stairs { difficulties, last_steps, .. } => {
                difficulties[last_steps.partition_point(|&last| last < step)]
            }
            Curriculum::Custom { function, .. } => function(step),
        }
    }

    /// The first step, from 1, by which a [`CurriculumScheduler`] has reached this difficulty or a greater one; `None` where it
    /// never does.
    pub fn first_step(&self, difficulty: u64) -> Option<u64> {
        match self {
            Curriculum::Growing(growth) => growth.first_step(difficulty),
            Curriculum::Stairs { difficulties, last_steps, max } => {
                let mut first = 1;
                let ends = last_steps.iter().map(Some).chain([None]);
                for (index, (reached, last)) in difficulties.iter().zip(ends).enumerate() {
                    // Two that end with the same step leave the second none; the first is there before any step.
                    let is_seen = index == 0 || last.is_none_or(|&last| first <= last);
                    if is_seen && *reached >= difficulty {
                        return Some(first);
                    }
                    // It stays, and what comes behind it is never looked at.
                    if is_seen && reached >= max {
                        return None;
                    }
                    first = last.map_or(first, |last| last.saturating_add(1).max(first));
                }
                None
            }
            Curriculum::Custom { .. } => None,
        }
    }

    /// The full difficulty.
    pub fn max(&self) -> u64 {
        match self {
            Curriculum::Growing(growth) => growth.max,
            Curriculum::Stairs { max, .. } | Curriculum::Custom { max, .. } => *max,
        }
    }
}

/// What of a curriculum is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CurriculumState {
    /// The difficulty now.
    pub current_difficulty: u64,
}

/// A curriculum and the difficulty it has reached.
#[derive(Debug, Clone)]
pub struct CurriculumScheduler {
    curriculum: Curriculum,
    current: u64,
}

impl CurriculumScheduler {
    /// At the start of a curriculum.
    pub fn new(curriculum: Curriculum) -> CurriculumScheduler {
        let current = match &curriculum {
            Curriculum::Growing(growth) => growth.min,
            other => other.difficulty(0),
        };
        CurriculumScheduler { curriculum, current }
    }

    /// Moves to a step and gives its difficulty. Once the full difficulty is reached, it stays.
    pub fn update(&mut self, step: u64) -> u64 {
        if self.current < self.curriculum.max() {
            self.current = self.curriculum.difficulty(step);
        }
        self.current
    }

    /// The difficulty now.
    pub fn current(&self) -> u64 {
        self.current
    }

    /// To be saved.
    pub fn state(&self) -> CurriculumState {
        CurriculumState { current_difficulty: self.current }
    }

    /// Continues where a saved one stood.
    pub fn load(&mut self, state: CurriculumState) {
        self.current = state.current_difficulty;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_step_of_a_difficulty_is_that_at_which_a_scheduler_reaches_it() {
        let stairs = |difficulty: Value, max_step: Value| {
            json!({"min_difficulty": 1, "max_difficulty": 50, "schedule_type": "fixed_discrete",
                "schedule_config": {"difficulty": difficulty, "max_step": max_step}})
        };
        for section in [
            stairs(json!([5, 20, 50]), json!([4, 9])),
            stairs(json!([5, 20, 10, 30]), json!([4, 9, 12])),
            // The second is never seen, and nothing behind the full one is.
            stairs(json!([5, 20, 30, 50, 70]), json!([4, 4, 9, 12])),
            json!({"min_difficulty": 8, "max_difficulty": 50, "schedule_type": "fixed_root",
                "schedule_config": {"total_curriculum_step": 20, "difficulty_step": 8, "root_degree": 2}}),
        ] {
            let curriculum = Curriculum::from_section(&section, None).unwrap();
            let mut scheduler = CurriculumScheduler::new(curriculum.clone());
            let reached: Vec<u64> = (1..=60).map(|step| scheduler.update(step)).collect();
            for difficulty in 0..80 {
                let first = reached.iter().position(|&reached| reached >= difficulty);
                let first = first.map(|index| index as u64 + 1);
                assert_eq!(curriculum.first_step(difficulty), first, "{section}: {difficulty}");
            }
        }
    }
}
