//! Layouts as what they are made of: what is near, some blocks that all see, random ones, and what of the future is seen.
//!
//! Every kind of layout is one choice of these four. A [`Pattern`] is checked when it is made; its rows are a pure function.

use std::ops::Range;

use ferrospeed_tensor::random::{RandomKey, stream_of_name};

use super::sparsity::{BigBird, BsLongformer, Direction, Fixed, LocalSlidingWindow, Variable};

/// A row of a layout is the union of what these say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pattern {
    near: Near,
    global: Global,
    /// Whether global blocks also see all.
    across: bool,
    /// Random blocks of a row.
    random: usize,
    later: Later,
}

/// The blocks around a row's own.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Near {
    All,
    /// Windows side by side, the last width again and again.
    Windows(Vec<usize>),
    /// So many on each side.
    Sliding(usize),
}

/// The blocks that all see.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Global {
    Ranges(Vec<Range<usize>>),
    /// The last `count` of every `window` blocks; for the next head those before them, in turn over `patterns` heads.
    OfWindows {
        window: usize,
        count: usize,
        patterns: usize,
    },
}

/// What a row sees of the blocks behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Later {
    All,
    /// Random ones, and of a group of global blocks that has begun its rest.
    RestOfGroups,
    Nothing,
}

impl Later {
    /// Of layouts that are made one-sided part by part.
    fn by_parts(direction: Direction) -> Later {
        match direction {
            Direction::Bidirectional => Later::All,
            Direction::Unidirectional => Later::RestOfGroups,
        }
    }

    /// Of layouts of which the lower triangle is taken.
    fn by_triangle(direction: Direction) -> Later {
        match direction {
            Direction::Bidirectional => Later::All,
            Direction::Unidirectional => Later::Nothing,
        }
    }
}

/// A pattern, or what contradicts itself and what to do about it.
type Checked<T> = Result<T, String>;

fn positive(key: &str, value: usize) -> Checked<usize> {
    if value == 0 { Err(format!("{key} is 0; take at least 1")) } else { Ok(value) }
}

impl Pattern {
    pub(super) fn dense() -> Pattern {
        let global = Global::Ranges(Vec::new());
        Pattern { near: Near::All, global, across: false, random: 0, later: Later::All }
    }

    pub(super) fn fixed(said: &Fixed) -> Checked<Pattern> {
        let window = positive("num_local_blocks", said.num_local_blocks)?;
        let count = positive("num_global_blocks", said.num_global_blocks)?;
        let patterns = positive("num_different_global_patterns", said.num_different_global_patterns)?;
        if !window.is_multiple_of(count) {
            return Err(format!(
                "num_local_blocks, {window}, is no multiple of num_global_blocks, {count}; choose one that is"
            ));
        }
        one_sided(said.attention, said.horizontal_global_attention)?;
        if patterns > 1 && !said.different_layout_per_head {
            return Err(format!(
                "num_different_global_patterns is {patterns}, and all heads have one layout; set different_layout_per_head to true, or leave it at 1"
            ));
        }
        if patterns > window / count {
            return Err(format!(
                "num_different_global_patterns is {patterns}, and a window has room for {}, num_local_blocks over num_global_blocks; take no more than that",
                window / count
            ));
        }
        Ok(Pattern {
            near: Near::Windows(vec![window]),
            global: Global::OfWindows { window, count, patterns },
            across: said.horizontal_global_attention,
            random: 0,
            later: Later::by_parts(said.attention),
        })
    }

    pub(super) fn variable(said: &Variable) -> Checked<Pattern> {
        if said.local_window_blocks.is_empty() {
            return Err("local_window_blocks is empty; name the width of one window at least".to_owned());
        }
        for width in &said.local_window_blocks {
            positive("a width in local_window_blocks", *width)?;
        }
        one_sided(said.attention, said.horizontal_global_attention)?;
        Ok(Pattern {
            near: Near::Windows(said.local_window_blocks.clone()),
            global: ranges(&said.global_block_indices, said.global_block_end_indices.as_deref())?,
            across: said.horizontal_global_attention,
            random: said.num_random_blocks,
            later: Later::by_parts(said.attention),
        })
    }

    pub(super) fn big_bird(said: &BigBird) -> Checked<Pattern> {
        let first = 0..said.num_global_blocks;
        Ok(Pattern {
            near: sliding(said.num_sliding_window_blocks)?,
            global: Global::Ranges(if first.is_empty() { Vec::new() } else { vec![first] }),
            across: true,
            random: said.num_random_blocks,
            later: Later::by_triangle(said.attention),
        })
    }

    pub(super) fn longformer(said: &BsLongformer) -> Checked<Pattern> {
        Ok(Pattern {
            near: sliding(said.num_sliding_window_blocks)?,
            global: ranges(&said.global_block_indices, said.global_block_end_indices.as_deref())?,
            across: true,
            random: 0,
            later: Later::by_triangle(said.attention),
        })
    }

    pub(super) fn sliding_window(said: &LocalSlidingWindow) -> Checked<Pattern> {
        Ok(Pattern {
            near: sliding(said.num_sliding_window_blocks)?,
            global: Global::Ranges(Vec::new()),
            across: false,
            random: 0,
            later: Later::by_triangle(said.attention),
        })
    }

    /// Whether heads differ where they may.
    pub(super) fn differs_by_head(&self) -> bool {
        self.random > 0 || matches!(self.global, Global::OfWindows { patterns, .. } if patterns > 1)
    }

    /// The global blocks of a head, as ranges within `blocks`.
    fn groups(&self, head: usize, blocks: usize) -> Vec<Range<usize>> {
        match &self.global {
            Global::Ranges(ranges) => {
                let within = ranges.iter().map(|range| range.start..range.end.min(blocks));
                within.filter(|range| !range.is_empty()).collect()
            }
            &Global::OfWindows { window, count, patterns } => {
                let first = window - (1 + head % patterns) * count;
                let end = blocks - blocks % window;
                let mut groups: Vec<_> =
                    (first..end).step_by(window).map(|start| start..start + count).collect();
                if end < blocks {
                    // A short last window has them as far behind as there is room.
                    let start = (end + first).min(blocks.saturating_sub(count));
                    groups.push(start..(start + count).min(blocks));
                }
                groups
            }
        }
    }

    /// The blocks near `row`.
    fn near(&self, row: usize, blocks: usize) -> Range<usize> {
        match &self.near {
            Near::All => 0..blocks,
            Near::Sliding(side) => row.saturating_sub(*side)..(row + side + 1).min(blocks),
            Near::Windows(widths) => {
                let mut start = 0usize;
                for (at, width) in widths.iter().enumerate() {
                    let is_last = at + 1 == widths.len();
                    if is_last {
                        start += (row - start) / width * width;
                    }
                    if is_last || row < start.saturating_add(*width) {
                        return start..start.saturating_add(*width).min(blocks);
                    }
                    start += width;
                }
                row..row + 1
            }
        }
    }

    /// Sets what `row` of a head sees.
    pub(super) fn row(&self, head: usize, row: usize, columns: &mut [bool], draw: &Draw) {
        let blocks = columns.len();
        let near = self.near(row, blocks);
        let end = if self.later == Later::All { near.end } else { near.end.min(row + 1) };
        columns[near.start..end].fill(true);
        for group in self.groups(head, blocks) {
            if self.later == Later::All || row >= group.start {
                columns[group.clone()].fill(true);
            }
            if self.across && group.contains(&row) {
                columns.fill(true);
            }
        }
        let population = if self.later == Later::Nothing { row + 1 } else { blocks };
        draw.some(self.random, population, [head, row, blocks], |column| columns[column] = true);
        if self.later == Later::Nothing {
            columns[row + 1..].fill(false);
        }
    }
}

/// One-sided layouts have no rows that see all.
fn one_sided(direction: Direction, horizontal: bool) -> Checked<()> {
    if direction == Direction::Unidirectional && horizontal {
        return Err(
            "horizontal_global_attention shows global blocks all that follows, which a unidirectional layout hides; leave it out, or set attention to bidirectional"
                .to_owned(),
        );
    }
    Ok(())
}

fn sliding(width: usize) -> Checked<Near> {
    Ok(Near::Sliding(positive("num_sliding_window_blocks", width)? / 2))
}

fn ranges(starts: &[usize], ends: Option<&[usize]>) -> Checked<Global> {
    let Some(ends) = ends else {
        return Ok(Global::Ranges(starts.iter().map(|start| *start..start.saturating_add(1)).collect()));
    };
    if starts.len() != ends.len() {
        return Err(format!(
            "global_block_indices names {} starts and global_block_end_indices {} ends; give each range both",
            starts.len(),
            ends.len()
        ));
    }
    if let Some((start, end)) = starts.iter().zip(ends).find(|(start, end)| start >= end) {
        return Err(format!(
            "a range of global blocks begins at {start} and ends before {end}, so it is empty; let it end behind its start"
        ));
    }
    Ok(Global::Ranges(starts.iter().zip(ends).map(|(start, end)| *start..*end).collect()))
}

/// Where random blocks come from: every rank and every resume draws the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Draw {
    pub(super) seed: u64,
    pub(super) layer: usize,
}

impl Draw {
    /// Some of `population` columns, each as likely as any other (Knuth, volume 2, algorithm 3.4.2S).
    fn some(
        &self,
        count: usize,
        population: usize,
        [head, row, blocks]: [usize; 3],
        mut choose: impl FnMut(usize),
    ) {
        let stream = stream_of_name("sparse attention");
        let key = RandomKey { step: self.layer as u32, ..RandomKey::new(self.seed, stream) };
        let mut wanted = count.min(population);
        for column in 0..population {
            if wanted == 0 {
                break;
            }
            let draw = f64::from(key.uniform(((head * blocks + row) * blocks + column) as u64));
            if draw * ((population - column) as f64) < wanted as f64 {
                choose(column);
                wanted -= 1;
            }
        }
    }
}
