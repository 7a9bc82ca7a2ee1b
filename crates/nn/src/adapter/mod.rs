//! Adapters of linear layers: LoRA, rsLoRA and DoRA.
//!
//! A layer `x·W + b` whose weight stays as it is learns a change of low rank beside it: `x·W + b + s·(x·Aᵀ)·Bᵀ`, with
//! `A [rank, inputs]` and `B [outputs, rank]`. (Hu et al.: "LoRA", 2021; Kalajdzievski: "rsLoRA", 2023, has another `s`; Liu et al.:
//! "DoRA", 2024, learns the length of each output's weights apart from their direction.)
//!
//! [`Adapters`] says which layers, by PEFT's rules, and how; [`Init::adapted_by`](crate::Init::adapted_by) hands it down, and a
//! [`Linear`](crate::Linear) finds at its own path whether it is meant. Every parameter that is neither an adapter's nor of a
//! module that is trained whole is frozen. [`Found`] tells afterwards what was meant, so that whoever builds a model can refuse
//! names that mean nothing.
//!
//! What is refused: embeddings, the output head, routers and experts of mixtures. Who makes such a layer says so
//! ([`Init::without_adapters`](crate::Init::without_adapters)); `all-linear` passes over them, a name that means one is an error.

mod found;
mod layer;
mod pattern;
mod request;
mod start;

pub(crate) use found::Adapting;
pub use found::{AdaptedLayer, Found};
pub(crate) use layer::Adapter;
pub use layer::in_mode;
pub use request::{Adapters, Scaling, Targets, TrainedBiases};
pub use start::{AdapterPart, Start, Whole, part_of};
