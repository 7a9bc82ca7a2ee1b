//! Who holds what of a model's state, where it lies, and what one step does to it: as data.
//!
//! [`place`] turns a configuration, the sizes of parameters and facts about ranks and devices into a [`Placement`]. Nothing
//! here has memory, talks to ranks or looks at a machine: the store allocates what is placed and does what the program says,
//! a plan sums the same tiles.
//!
//! Read in this order: [`stage`] (where the four stages differ, in one table), [`facts`] (what is asked), [`layout`] (who owns
//! which elements), [`matrices`] (who works on which whole ones), [`share`] (values, masters and states of some parameters, as tiles), [`buckets`] (what travels together),
//! [`gradients`] (where gradients are between backward and step), [`program`] (what a step does), [`show`] (as text).
//!
//! A *share* is the parameters of one optimizer group that are spread over ranks in one way. A *tile* is a run of one rank's
//! bytes of a share with one purpose, type and home. A *home* is where a tile is while nobody works on it.

pub mod buckets;
pub mod facts;
pub mod gradients;
pub mod layout;
pub mod matrices;
pub mod program;
pub mod share;
pub mod show;
pub mod stage;

pub use facts::{DeviceKind, GroupFacts, ParamFacts, Ranks, Request, Spread, Tie, UpdateRule};
pub use gradients::{Departure, Gradients, Kept};
pub use program::{Action, Program, Publish};
pub use share::{Flat, Home, Memory, Owners, Share, Tile};

use buckets::Bucket;

/// Who holds what, where, and what a step does to it, as one rank sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// This rank's shares: of every group the one that is spread in the common way, be it empty, and those that are spread
    /// otherwise; what nobody trains comes last.
    pub shares: Vec<Share>,
    /// (share, place in it) of every parameter.
    pub seats: Vec<(usize, usize)>,
    /// What of the gradients travels together, in the order in which it leaves.
    pub buckets: Vec<Bucket>,
    /// Where gradients are between backward and step.
    pub gradients: Gradients,
    /// What a step does.
    pub program: Program,
}

impl Placement {
    /// The shares that are trained.
    pub fn trained(&self) -> impl Iterator<Item = &Share> {
        self.shares.iter().filter(|share| share.trained)
    }

    /// Every tile of this rank that lasts from step to step.
    pub fn tiles(&self) -> impl Iterator<Item = Tile> + '_ {
        let of_shares = self.shares.iter().flat_map(Share::tiles);
        of_shares.chain(self.gradients.tiles(&self.buckets))
    }
}

/// Places a model's state.
pub fn place(request: &Request<'_>) -> Placement {
    let (shares, seats) = share::shares(request);
    let trained: Vec<&Share> = shares.iter().filter(|share| share.trained).collect();
    let buckets = buckets::of_shares(request, &trained);
    let gradients = gradients::gradients(&request.gradients(&trained), &trained, &buckets);
    let program = program::program(request, &shares, &buckets, &gradients);
    Placement { shares, seats, buckets, gradients, program }
}
