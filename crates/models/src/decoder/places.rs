//! Where tokens stand: positions, masks, rotary tables and ALiBi slopes of a pass.

use ferrospeed_nn::{Rotary, RotaryTable, Visibility};
use ferrospeed_tensor::{Device, Documents, Pages, Tensor};

use super::config::Positions;
use super::{Decoder, Tokens};
use crate::error::{ModelError, Result};

impl Decoder {
    /// What a decoding step has to be told of its place: tables over all places, to look up on the device. `None` where a
    /// step depends on more than its place.
    pub(crate) fn step_tables(&self, capacity: usize, device: &Device) -> Result<Option<StepTables>> {
        let mut tables = StepTables { row_offset: 0, rotary: None, local_rotary: None, alibi_slopes: None };
        if self.blocks.iter().any(|block| block.is_composed(device) || block.linear().is_some()) {
            return Ok(None);
        }
        match &self.config.positions {
            Positions::Learned { offset, .. } => tables.row_offset = *offset,
            // The frequencies change with the length.
            Positions::Rotary(rotary) if rotary.steady_length().is_some_and(|steady| capacity > steady) => {
                return Ok(None);
            }
            Positions::Rotary(rotary) => {
                let mut all = Visibility::default();
                self.turn(&mut all, rotary, &[(0..capacity).collect()], capacity, device)?;
                (tables.rotary, tables.local_rotary) = (all.rotary, all.local_rotary);
            }
            Positions::Alibi => tables.alibi_slopes = Some(self.slopes(device)?),
        }
        Ok(Some(tables))
    }

    /// Whether what is cached of `before` tokens is of no use to a text of `after`.
    pub(crate) fn turns_anew(&self, before: usize, after: usize) -> bool {
        matches!(&self.config.positions, Positions::Rotary(rotary) if rotary.turns_anew(before, after))
    }

    pub(super) fn slopes(&self, device: &Device) -> Result<Tensor> {
        Ok(Tensor::from_slice(&alibi_slopes(self.config.heads), [self.config.heads], device)?)
    }

    pub(crate) fn check_length(&self, length: usize) -> Result<()> {
        // Only a learned table ends; rotary and ALiBi go on.
        if self.learned_positions.is_some() && length > self.config.max_tokens {
            let why = format!(
                "a sequence of {length} tokens is longer than the model's {}",
                self.config.max_tokens
            );
            return Err(ModelError::config("max positions", why));
        }
        Ok(())
    }

    /// The documents that share the sequences.
    pub(super) fn documents(&self, tokens: &Tokens, is_cached: bool) -> Result<Option<Documents>> {
        let Some(borders) = &tokens.documents else { return Ok(None) };
        let refuse = |why: &str| Err(ModelError::config("documents", why));
        if is_cached {
            return refuse("a cache holds one text for each sequence; run documents without it");
        }
        if tokens.mask.is_some() {
            return refuse("they fill their sequences, so nothing is masked; leave out the mask");
        }
        let documents = Documents::new(borders.clone(), tokens.ids.device())?;
        if [documents.rows(), documents.tokens()] != tokens.ids.sizes() {
            let (rows, length) = (documents.rows(), documents.tokens());
            let why = format!(
                "their lengths are those of {rows} sequences of {length} tokens; the ids are {}",
                tokens.ids.shape()
            );
            return refuse(&why);
        }
        Ok(Some(documents))
    }

    /// One row of positions per sequence, or one for all; rows of the table where positions are learned.
    pub(super) fn positions(
        &self,
        tokens: &Tokens,
        documents: Option<&Documents>,
        [batch, count]: [usize; 2],
        past: usize,
    ) -> Result<Vec<Vec<usize>>> {
        let fits = |rows: &[Vec<u8>]| rows.len() == batch && rows.iter().all(|row| row.len() == past + count);
        if let Some(mask) = &tokens.mask
            && !fits(mask)
        {
            let why = format!("does not cover {batch} sequences of {} tokens", past + count);
            return Err(ModelError::config("attention mask", why));
        }
        let (offset, from_mask) = match self.config.positions {
            Positions::Learned { offset, from_mask } => (offset, from_mask),
            Positions::Rotary(_) | Positions::Alibi => (0, false),
        };
        if let (true, Some(mask)) = (from_mask, &tokens.mask) {
            // A masked token takes the row before the first.
            let place = |row: &Vec<u8>| {
                let mut seen = 0;
                let places = row.iter().map(|&real| {
                    seen += usize::from(real != 0);
                    if real != 0 { offset + seen - 1 } else { offset.saturating_sub(1) }
                });
                places.collect::<Vec<_>>().split_off(past)
            };
            return Ok(mask.iter().map(place).collect());
        }
        let positions = match (&tokens.positions, documents) {
            (Some(positions), _) => positions.clone(),
            (None, Some(documents)) => documents.positions(),
            (None, None) => vec![(past..past + count).collect()],
        };
        Ok(positions
            .into_iter()
            .map(|row| row.into_iter().map(|position| position + offset).collect())
            .collect())
    }

    /// Gives a pass its rotary tables.
    pub(super) fn turn(
        &self,
        visibility: &mut Visibility,
        rotary: &Rotary,
        positions: &[Vec<usize>],
        length: usize,
        device: &Device,
    ) -> Result<()> {
        let growth = self.config.scores.growth.as_ref();
        visibility.rotary = Some(rotary.table_with_growth(positions, length, growth, device)?);
        if let Some(local) = &self.config.local_rotary {
            visibility.local_rotary = Some(local.table_with_growth(positions, length, growth, device)?);
        }
        Ok(())
    }

    pub(super) fn visibility(
        &self,
        tokens: &Tokens,
        positions: &[Vec<usize>],
        [batch, keys]: [usize; 2],
        length: usize,
        device: &Device,
    ) -> Result<Visibility> {
        let key_mask = match &tokens.mask {
            Some(mask) => Some(Tensor::from_slice(&mask.concat(), [batch, keys], device)?),
            None => None,
        };
        let mut visibility = Visibility { key_mask, ..Default::default() };
        match &self.config.positions {
            Positions::Learned { .. } => {}
            Positions::Rotary(rotary) => self.turn(&mut visibility, rotary, positions, length, device)?,
            Positions::Alibi => {
                visibility.alibi_slopes = Some(self.slopes(device)?);
                if let Some(mask) = &tokens.mask {
                    let places: Vec<f32> = mask
                        .iter()
                        .flat_map(|row| {
                            row.iter().scan(0.0, |seen, &real| {
                                *seen += f32::from(u8::from(real != 0));
                                Some(if real != 0 { *seen - 1.0 } else { 0.0 })
                            })
                        })
                        .collect();
                    visibility.alibi_positions = Some(Tensor::from_slice(&places, [batch, keys], device)?);
                }
            }
        }
        Ok(visibility)
    }
}

/// The tokens of the longest document.
pub(super) fn longest(documents: &Documents) -> usize {
    (0..documents.rows())
        .flat_map(|row| documents.of_row(row))
        .map(|document| document.len())
        .max()
        .unwrap_or(0)
}

/// What a pass knows of where its tokens stand.
#[derive(Debug)]
pub(crate) struct Places {
    /// Rows of the table of learned positions.
    pub(crate) rows: Option<Tensor>,
    /// Its [`Visibility::sequence`] says which tokens of the input the pass has; `None`: all.
    pub(crate) visibility: Visibility,
}

/// What decoding steps look up by their place.
#[derive(Debug)]
pub(crate) struct StepTables {
    /// Rows before position 0 in the table of learned positions.
    pub(crate) row_offset: usize,
    rotary: Option<RotaryTable>,
    local_rotary: Option<RotaryTable>,
    alibi_slopes: Option<Tensor>,
}

impl StepTables {
    /// The places of one token per sequence, all at `place`; `row` is [`StepTables::row_offset`] further.
    pub(crate) fn at(&self, place: &Tensor, row: &Tensor) -> Result<Places> {
        let rotary = self.rotary.as_ref().map(|table| table.at(place)).transpose()?;
        let visibility = Visibility {
            rotary,
            local_rotary: self.local_rotary.as_ref().map(|table| table.at(place)).transpose()?,
            alibi_slopes: self.alibi_slopes.clone(),
            place: Some(place.clone()),
            ..Default::default()
        };
        Ok(Places { rows: Some(row.clone()), visibility })
    }

    /// The places of the rows of a pass over `pages`; `rows` are [`StepTables::row_offset`] further.
    pub(super) fn of_pages(&self, places: &Tensor, rows: &Tensor, pages: Pages) -> Result<Places> {
        let rotary = self.rotary.as_ref().map(|table| table.at(places)).transpose()?;
        let alibi_slopes = self.alibi_slopes.clone();
        let local_rotary = self.local_rotary.as_ref().map(|table| table.at(places)).transpose()?;
        let pages = Some(pages);
        let visibility = Visibility { rotary, local_rotary, alibi_slopes, pages, ..Default::default() };
        Ok(Places { rows: Some(rows.clone()), visibility })
    }
}

/// One slope per head: powers of `2^(-8/n)`; heads beyond a power of two take odd powers of the next.
/// (Press, Smith, Lewis: "Train short, test long", 2022.)
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    let whole = 1usize << heads.ilog2();
    let base = |n: usize| 2f64.powf(-(2f64.powf(-((n as f64).log2() - 3.0))));
    let first = (1..=whole).map(|power| base(whole).powi(power as i32));
    let extra = (0..heads - whole).map(|index| base(2 * whole).powi(2 * index as i32 + 1));
    first.chain(extra).map(|slope| slope as f32).collect()
}
