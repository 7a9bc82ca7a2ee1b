//! What a run needs, before it starts.
//!
//! [`estimate`] holds DeepSpeed's ZeRO estimators, [`model`] counts the parameters of a Hugging Face model from its
//! `config.json`, [`plan`] says how many bytes each rank keeps in each tier and whether they fit, [`stages`] the same for the
//! fullest stage of a model that is cut into some, [`crossing`] what hosts send each other, [`cost`] what a step computes and
//! sends and how long that takes, [`layout`] how ranks may be laid out and [`search`] which of that is fastest, [`simulate`] what a step of very many ranks does
//! when, [`serve`] what
//! generating text takes, and [`tuning`] which configurations are worth trying. All of it is arithmetic: nothing here looks at
//! the machine or starts anything.

mod activations;
pub mod cost;
pub mod crossing;
pub mod estimate;
mod experts;
pub mod layout;
pub mod model;
pub mod plan;
mod planner;
pub mod search;
pub mod serve;
pub mod simulate;
mod slices;
pub mod stages;
pub mod tuning;
mod usual;

#[cfg(test)]
extern crate self as ferrospeed_tune;
#[cfg(test)]
#[path = "../tests/it/main.rs"]
mod it;
