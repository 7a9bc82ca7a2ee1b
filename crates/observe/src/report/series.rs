//! Long series made short enough to draw, without losing what a reader looks for.

/// One point of a curve.
pub(crate) type Point = (f64, f64);

/// More points than this on one curve cannot be told apart.
const MOST_POINTS: usize = 480;

/// A curve in pieces (it breaks where a value is no number) and the places where it breaks.
pub(crate) struct Curve {
    /// Runs of finite points.
    pub(crate) pieces: Vec<Vec<Point>>,
    /// Where a value was NaN or infinite.
    pub(crate) broken_at: Vec<f64>,
}

impl Curve {
    /// Keeps the lowest and highest point of every stretch, so that a spike stays a spike.
    pub(crate) fn new(points: &[Point]) -> Curve {
        let stretch_length = points.len().div_ceil(MOST_POINTS / 2).max(1);
        let mut curve = Curve { pieces: vec![Vec::new()], broken_at: Vec::new() };
        let keep_all = points.len() <= MOST_POINTS;
        for stretch in points.chunks(if keep_all { 1 } else { stretch_length }) {
            let finite = || stretch.iter().filter(|point| point.1.is_finite());
            if let Some(broken) = stretch.iter().find(|point| !point.1.is_finite()) {
                curve.broken_at.push(broken.0);
            }
            let low = finite().min_by(|a, b| a.1.total_cmp(&b.1));
            let high = finite().max_by(|a, b| a.1.total_cmp(&b.1));
            let (Some(&low), Some(&high)) = (low, high) else {
                curve.pieces.push(Vec::new());
                continue;
            };
            let piece = curve.pieces.last_mut().expect("there is always a piece");
            let (first, second) = if low.0 <= high.0 { (low, high) } else { (high, low) };
            piece.push(first);
            if second.0 > first.0 {
                piece.push(second);
            }
        }
        curve.pieces.retain(|piece| !piece.is_empty());
        curve
    }

    /// The points of all pieces.
    pub(crate) fn points(&self) -> impl Iterator<Item = &Point> {
        self.pieces.iter().flatten()
    }
}

/// How the rows of one stretch become one.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Merge {
    /// For levels that must not be exceeded.
    Highest,
    /// For shares of a whole.
    Mean,
}

/// Rows of layers at positions; a value that is no number counts as 0.
pub(crate) fn shorten_rows(rows: &[(f64, Vec<f64>)], merge: Merge) -> Vec<(f64, Vec<f64>)> {
    let stretch_length = rows.len().div_ceil(MOST_POINTS / 2).max(1);
    let merged = |stretch: &[(f64, Vec<f64>)]| {
        let layers = stretch[0].1.len();
        let values = (0..layers).map(|layer| {
            let column =
                stretch.iter().map(|row| row.1[layer]).map(|v| if v.is_finite() { v.max(0.0) } else { 0.0 });
            match merge {
                Merge::Highest => column.fold(0.0, f64::max),
                Merge::Mean => column.sum::<f64>() / stretch.len() as f64,
            }
        });
        (stretch[0].0, values.collect())
    };
    rows.chunks(stretch_length).map(merged).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spike_among_many_points_is_kept() {
        let points: Vec<Point> =
            (0..100_000).map(|x| (x.into(), if x == 54_321 { 9.0 } else { 1.0 })).collect();
        let curve = Curve::new(&points);
        assert!(curve.points().count() <= MOST_POINTS);
        assert!(curve.points().any(|&point| point == (54_321.0, 9.0)));
        assert_eq!(curve.pieces.len(), 1);
    }

    #[test]
    fn a_curve_breaks_where_a_value_is_no_number() {
        let curve = Curve::new(&[(1.0, 1.0), (2.0, f64::NAN), (3.0, 2.0), (4.0, f64::INFINITY)]);
        assert_eq!(curve.pieces, [vec![(1.0, 1.0)], vec![(3.0, 2.0)]]);
        assert_eq!(curve.broken_at, [2.0, 4.0]);
        assert!(Curve::new(&[]).pieces.is_empty());
    }

    #[test]
    fn rows_merge_as_asked() {
        let rows: Vec<_> = (0..1000).map(|x| (x.into(), vec![x.into(), f64::NAN])).collect();
        let highest = shorten_rows(&rows, Merge::Highest);
        assert_eq!(highest[0], (0.0, vec![4.0, 0.0]));
        assert_eq!(shorten_rows(&rows, Merge::Mean)[0], (0.0, vec![2.0, 0.0]));
        assert_eq!(highest.len(), 200);
    }
}
