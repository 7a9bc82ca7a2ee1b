//! Ranks on a grid with named axes.
//!
//! [`ProcessTopology`] numbers the points of a Cartesian grid row by row: the last axis varies fastest. It is pure
//! arithmetic; [`Mesh`](crate::Mesh) adds the process groups.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

/// The axis whose ranks hold successive stages of a model.
pub const PIPE: &str = "pipe";
/// The axis whose ranks hold the same part of the model and see different data.
pub const DATA: &str = "data";
/// The axis whose ranks hold slices of the same layers.
pub const MODEL: &str = "model";

/// A Cartesian grid of ranks with named axes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessTopology {
    axes: Vec<String>,
    dims: Vec<usize>,
}

impl ProcessTopology {
    /// A grid with these axes, the last varying fastest.
    pub fn new<S: Into<String>>(axes: impl IntoIterator<Item = (S, usize)>) -> Result<Self> {
        let (axes, dims): (Vec<String>, Vec<usize>) =
            axes.into_iter().map(|(name, dim)| (name.into(), dim)).unzip();
        let refuse = |problem: String| Err(Error::Topology { problem });
        if axes.is_empty() {
            return refuse("a topology needs at least one axis".into());
        }
        for (index, axis) in axes.iter().enumerate() {
            if axes[..index].contains(axis) {
                return refuse(format!("the axis {axis:?} is named twice"));
            }
            if dims[index] == 0 {
                return refuse(format!("the axis {axis:?} has length 0"));
            }
        }
        if dims.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim)).is_none() {
            return refuse(format!("{dims:?} has more points than can be counted"));
        }
        Ok(ProcessTopology { axes, dims })
    }

    /// Stages × data-parallel ranks; neighbours are data-parallel peers of one stage.
    pub fn pipe_data(pipe: usize, data: usize) -> Result<Self> {
        Self::new([(PIPE, pipe), (DATA, data)])
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.dims.iter().product()
    }

    /// The axes, in order.
    pub fn axes(&self) -> &[String] {
        &self.axes
    }

    /// The length of an axis; 0 when there is none of that name.
    pub fn dim(&self, axis: &str) -> usize {
        self.position(axis).map_or(0, |position| self.dims[position])
    }

    fn position(&self, axis: &str) -> Option<usize> {
        self.axes.iter().position(|name| name == axis)
    }

    fn known(&self, axis: &str) -> Result<usize> {
        self.position(axis).ok_or_else(|| Error::Topology {
            problem: format!("there is no axis {axis:?}; the axes are {}", self.axes.join(", ")),
        })
    }

    /// The rank at a point, given as exactly one value per axis.
    pub fn rank(&self, point: &[(&str, usize)]) -> Result<usize> {
        let mut coordinates = vec![None; self.axes.len()];
        for (axis, value) in point {
            let position = self.known(axis)?;
            if *value >= self.dims[position] {
                let problem = format!("{axis} {value} is not below its length {}", self.dims[position]);
                return Err(Error::Topology { problem });
            }
            if coordinates[position].replace(*value).is_some() {
                return Err(Error::Topology { problem: format!("{axis} is given twice") });
            }
        }
        let missing = self.axes.iter().zip(&coordinates).find(|(_, value)| value.is_none());
        if let Some((axis, _)) = missing {
            return Err(Error::Topology {
                problem: format!("a rank needs a value for every axis; {axis} is missing"),
            });
        }
        Ok(coordinates.iter().zip(&self.dims).fold(0, |rank, (value, dim)| rank * dim + value.unwrap_or(0)))
    }

    /// The point of a rank, one value per axis, in order.
    pub fn coordinates(&self, rank: usize) -> Result<Vec<usize>> {
        if rank >= self.world_size() {
            return Err(Error::Topology {
                problem: format!("rank {rank} is not in a world of {}", self.world_size()),
            });
        }
        let mut rest = rank;
        let mut coordinates: Vec<usize> = self
            .dims
            .iter()
            .rev()
            .map(|dim| {
                let value = rest % dim;
                rest /= dim;
                value
            })
            .collect();
        coordinates.reverse();
        Ok(coordinates)
    }

    /// A rank's value on one axis.
    pub fn coordinate(&self, rank: usize, axis: &str) -> Result<usize> {
        let position = self.known(axis)?;
        Ok(self.coordinates(rank)?[position])
    }

    /// The rank at the point of `rank` with some values replaced.
    pub fn rank_with(&self, rank: usize, replaced: &[(&str, usize)]) -> Result<usize> {
        let coordinates = self.coordinates(rank)?;
        for (axis, _) in replaced {
            self.known(axis)?;
        }
        let value = |(index, axis): (usize, &String)| {
            let new = replaced.iter().rev().find(|(name, _)| name == axis).map(|(_, value)| *value);
            (axis.clone(), new.unwrap_or(coordinates[index]))
        };
        let point: Vec<(String, usize)> = self.axes.iter().enumerate().map(value).collect();
        self.rank(&point.iter().map(|(axis, value)| (axis.as_str(), *value)).collect::<Vec<_>>())
    }

    /// The ranks that match all criteria, ascending.
    pub fn filter(&self, criteria: &[(&str, usize)]) -> Result<Vec<usize>> {
        let criteria: Vec<(usize, usize)> =
            criteria.iter().map(|(axis, value)| Ok((self.known(axis)?, *value))).collect::<Result<_>>()?;
        let matches = |rank: &usize| {
            let coordinates = self.coordinates(*rank).unwrap_or_default();
            criteria.iter().all(|(position, value)| coordinates.get(*position) == Some(value))
        };
        Ok((0..self.world_size()).filter(matches).collect())
    }

    /// The ranks with one value on an axis, ascending; none when the axis is shorter.
    pub fn axis_list(&self, axis: &str, index: usize) -> Result<Vec<usize>> {
        self.filter(&[(axis, index)])
    }

    /// The lists of ranks that differ on this axis alone, in the order of the other axes; none for an unknown axis.
    pub fn axis_comm_lists(&self, axis: &str) -> Vec<Vec<usize>> {
        self.comm_lists(&[axis])
    }

    /// The lists of ranks that differ on these axes alone, in the order of the others. Unknown axes are passed over.
    pub fn comm_lists(&self, axes: &[&str]) -> Vec<Vec<usize>> {
        let free: Vec<usize> = axes.iter().filter_map(|axis| self.position(axis)).collect();
        if free.is_empty() {
            return Vec::new();
        }
        let mut lists: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
        for rank in 0..self.world_size() {
            let mut fixed = self.coordinates(rank).unwrap_or_default();
            free.iter().for_each(|position| fixed[*position] = 0);
            lists.entry(fixed).or_default().push(rank);
        }
        lists.into_values().collect()
    }

    /// A rank's point in words, such as `model_01`, without the axes in `omit`; may be empty.
    pub fn describe(&self, rank: usize, omit: &[&str], inner: &str, outer: &str) -> Result<String> {
        let coordinates = self.coordinates(rank)?;
        let pieces = self.axes.iter().zip(coordinates).filter(|(axis, _)| !omit.contains(&axis.as_str()));
        Ok(pieces.map(|(axis, value)| format!("{axis}{inner}{value:02}")).collect::<Vec<_>>().join(outer))
    }
}
