//! A model's layers on stages, in the order a schedule wants them: what is asked, checked before anything starts.
//!
//! A stage has one chunk of consecutive layers, or several, as the schedule says. What leaves a chunk without layers, names
//! no schedule that trains, or asks for micro-batches that a schedule cannot take is refused with the key it comes from.

use std::num::NonZeroUsize;
use std::ops::Range;

use crate::error::{PipelineError, Result, did_you_mean, nearest};
use crate::partition::{LayerSize, Method, part};
use crate::schedule::{Kind, MOST_CHUNKS, Schedule};
use crate::validate::{Sends, validate};

/// What a configuration says of stages.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// `pipeline.stages`.
    pub stages: NonZeroUsize,
    /// `pipeline.partition`; DeepSpeed's default `best` divides by parameters.
    pub partition: &'a str,
    /// `pipeline.schedule`.
    pub schedule: &'a str,
    /// Micro-batches of a step.
    pub micro_batches: usize,
}

impl Asked<'_> {
    /// The schedule that it names, if a step can follow it.
    pub fn kind(&self) -> Result<Kind> {
        let refuse = |why: String| PipelineError::Key { key: "pipeline.schedule", why };
        // Of the schedules that there are, only those that train are offered.
        let advice = || {
            let word = self.schedule.split(':').next().unwrap_or_default();
            let near = nearest(word, &["1f1b", "interleaved", "zb-h1", "zb-v"]);
            let near = if near == Some("interleaved") { Some("interleaved:CHUNKS") } else { near };
            let near = did_you_mean(near);
            format!("{near}use 1f1b, interleaved:CHUNKS (up to {MOST_CHUNKS}), zb-h1 or zb-v")
        };
        match self.schedule.parse() {
            Ok(Kind::Inference | Kind::DataParallel) => {
                Err(refuse(format!("'{}' does not train a model in stages: {}", self.schedule, advice())))
            }
            Ok(kind) => Ok(kind),
            Err(_) => Err(refuse(format!("schedule '{}' is not known: {}", self.schedule, advice()))),
        }
    }

    /// Whether the first chunk and the last lie on one stage, which then has once what both use.
    pub fn ends_meet(&self) -> bool {
        self.stages.get() == 1 || matches!(self.kind(), Ok(Kind::ZeroBubbleV))
    }

    /// How layers are to be divided.
    pub fn method(&self) -> Result<Method> {
        let named = if self.partition == "best" { "parameters" } else { self.partition };
        named.parse().map_err(partition_key)
    }
}

fn partition_key(error: PipelineError) -> PipelineError {
    PipelineError::Key { key: "pipeline.partition", why: error.to_string() }
}

/// Which chunk has which layers, and which stage has which chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Division {
    /// The order of a step's work.
    pub kind: Kind,
    /// The stage of each chunk.
    pub stage_of_chunk: Vec<usize>,
    /// Where the layers of chunks begin and end.
    pub boundaries: Vec<usize>,
}

impl Division {
    /// Divides layers as asked.
    pub fn of(asked: &Asked<'_>, layers: &[LayerSize]) -> Result<Division> {
        let (stages, kind) = (asked.stages, asked.kind()?);
        let schedule_key =
            |error: PipelineError| PipelineError::Key { key: "pipeline.schedule", why: error.to_string() };
        let schedule = Schedule::new(kind, stages.get(), asked.micro_batches).map_err(schedule_key)?;
        let stage_of_chunk = kind.placement(stages.get());
        let (chunks, method) = (stage_of_chunk.len(), asked.method()?);
        let held = match method {
            Method::Memory => {
                let of_stages = validate(&schedule, Sends::Buffered).map_err(schedule_key)?;
                let per_chunk = (chunks / stages) as f64;
                stage_of_chunk.iter().map(|stage| of_stages[*stage].activations as f64 / per_chunk).collect()
            }
            _ => vec![1.0; chunks],
        };
        let boundaries = method.divide(layers, &held).map_err(partition_key)?;
        let division = Division { kind, stage_of_chunk, boundaries };
        match (0..chunks).find(|chunk| division.layers_of_chunk(*chunk).is_empty()) {
            None => Ok(division),
            Some(empty) => {
                let what = if chunks == stages.get() { "stage" } else { "chunk" };
                let why = format!(
                    "{what} {empty} of {chunks} gets none of {} layers: use fewer stages, another pipeline.partition, or a pipeline.schedule with fewer chunks",
                    layers.len()
                );
                Err(PipelineError::Key { key: "pipeline.stages", why })
            }
        }
    }

    /// How many stages there are.
    pub fn stages(&self) -> usize {
        self.stage_of_chunk.iter().max().map_or(0, |last| last + 1)
    }

    /// The layers of a chunk.
    pub fn layers_of_chunk(&self, chunk: usize) -> Range<usize> {
        part(&self.boundaries, chunk)
    }

    /// The chunks of a stage, in order.
    pub fn chunks_of(&self, stage: usize) -> impl Iterator<Item = usize> {
        self.stage_of_chunk.iter().enumerate().filter(move |(_, of)| **of == stage).map(|(chunk, _)| chunk)
    }
}

impl std::fmt::Display for Division {
    /// `0: layers 0–3; 1: layers 4–7`, counted from 0.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for stage in 0..self.stages() {
            let chunks = self.chunks_of(stage).map(|chunk| {
                let layers = self.layers_of_chunk(chunk);
                match layers.len() {
                    1 => layers.start.to_string(),
                    _ => format!("{}–{}", layers.start, layers.end.saturating_sub(1)),
                }
            });
            let chunks: Vec<String> = chunks.collect();
            let between = if stage == 0 { "" } else { "; " };
            write!(formatter, "{between}{stage}: layers {}", chunks.join(" and "))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked<'a>(stages: usize, partition: &'a str, schedule: &'a str, micro_batches: usize) -> Asked<'a> {
        Asked { stages: NonZeroUsize::new(stages).unwrap(), partition, schedule, micro_batches }
    }

    fn blocks(count: usize) -> Vec<LayerSize> {
        vec![LayerSize { class: "Block".to_owned(), parameters: 10, measured: None }; count]
    }

    #[test]
    fn a_division_says_which_stage_has_which_layers() {
        let division = Division::of(&asked(2, "uniform", "1f1b", 4), &blocks(5)).unwrap();
        assert_eq!(division.to_string(), "0: layers 0–2; 1: layers 3–4");
        let division = Division::of(&asked(2, "best", "zb-v", 4), &blocks(5)).unwrap();
        assert_eq!(division.stages(), 2);
        assert_eq!(division.to_string(), "0: layers 0–1 and 4; 1: layers 2 and 3");
    }

    #[test]
    fn what_cannot_be_divided_names_the_key_and_what_to_do() {
        let told =
            |asked: Asked<'_>, layers: usize| Division::of(&asked, &blocks(layers)).unwrap_err().to_string();
        let stages = told(asked(7, "parameters", "1f1b", 8), 6);
        assert!(
            stages.starts_with("pipeline.stages: stage 6 of 7 gets none of 6 layers: use fewer"),
            "{stages}"
        );
        let method = told(asked(2, "alphabet", "1f1b", 8), 6);
        assert!(
            method.starts_with("pipeline.partition: partition method 'alphabet' is not known: use"),
            "{method}"
        );
        for (given, meant) in
            [("unifrom", "uniform"), ("Parameter", "parameters"), ("typ:Block", "type:REGEX")]
        {
            let method = told(asked(2, given, "1f1b", 8), 6);
            assert!(method.contains(&format!("did you mean '{meant}'?")), "{method}");
        }
        for (given, meant) in [("1f1", "1f1b"), ("zb-h2", "zb-h1"), ("interleave:2", "interleaved:CHUNKS")] {
            let schedule = told(asked(2, "uniform", given, 8), 6);
            assert!(schedule.contains(&format!("did you mean '{meant}'?")), "{schedule}");
        }
        let none = told(asked(2, "type:Cloud", "1f1b", 8), 6);
        assert!(
            none.starts_with("pipeline.partition: ") && none.contains("no layer has such a name"),
            "{none}"
        );
        let schedule = told(asked(2, "uniform", "zigzag", 8), 6);
        assert!(schedule.starts_with("pipeline.schedule: ") && schedule.contains("'zigzag'"), "{schedule}");
        // What does not train is no advice for who trains.
        assert!(!schedule.contains("inference") && !schedule.contains("data-parallel"), "{schedule}");
        let idle = told(asked(2, "uniform", "inference", 8), 6);
        assert!(idle.contains("'inference' does not train"), "{idle}");
        let endless = told(asked(2, "uniform", "interleaved:18446744073709551615", 3), 6);
        assert!(endless.contains("interleaved:CHUNKS"), "{endless}");
        let turns = told(asked(2, "uniform", "interleaved:2", 3), 6);
        assert!(turns.contains("3 micro-batches are not a multiple of 2 stages"), "{turns}");
    }
}
