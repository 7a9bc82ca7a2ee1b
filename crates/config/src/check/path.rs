//! The path of a key while the tree is walked, spelled out only when a message needs it.

use std::fmt;

use crate::reader::shorten;

/// A key or list index below its parent's path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Path<'a> {
    parent: Option<&'a Path<'a>>,
    segment: Segment<'a>,
}

#[derive(Debug, Clone, Copy)]
enum Segment<'a> {
    Root,
    Key(&'a str),
    Index(usize),
}

impl<'a> Path<'a> {
    /// The whole configuration.
    pub(crate) const ROOT: Path<'static> = Path { parent: None, segment: Segment::Root };

    /// A key below this path.
    pub(crate) fn key(&'a self, name: &'a str) -> Path<'a> {
        Path { parent: Some(self), segment: Segment::Key(name) }
    }

    /// A list item below this path.
    pub(crate) fn index(&'a self, index: usize) -> Path<'a> {
        Path { parent: Some(self), segment: Segment::Index(index) }
    }
}

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(parent) = self.parent {
            write!(f, "{parent}")?;
        }
        match self.segment {
            Segment::Root => Ok(()),
            Segment::Index(index) => write!(f, "[{index}]"),
            Segment::Key(name) => {
                let top = self.parent.is_none_or(|parent| matches!(parent.segment, Segment::Root));
                write!(f, "{}{}", if top { "" } else { "." }, shorten(name))
            }
        }
    }
}
