//! Numbers as DeepSpeed's profiler writes them: `"16.9 K"`, `"219.74 KMACs"`, `"47 ms"`.
//!
//! A magnitude is chosen before rounding, so 999 995 is `"1000 K"`; a number without one keeps the space in front of its unit,
//! and a negative number is written in millionths. All of that is how DeepSpeed does it, and reports are compared letter by letter.

const MAGNITUDES: [(&str, f64); 6] =
    [("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3), ("m", 1e-3), ("u", 1e-6)];

/// How a number is written; the default is DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumberStyle<'a> {
    /// The magnitude, in place of the one that fits: `T`, `G`, `M`, `K`, `m`, `u`; any other text stands for itself.
    pub units: Option<&'a str>,
    /// Digits behind the point.
    pub precision: usize,
}

impl Default for NumberStyle<'_> {
    fn default() -> Self {
        NumberStyle { units: None, precision: 2 }
    }
}

impl NumberStyle<'_> {
    /// The number, a space, and its magnitude.
    pub fn number(&self, number: f64) -> String {
        let (units, size) = match self.units {
            Some(units) => MAGNITUDES.into_iter().find(|(name, _)| *name == units).unwrap_or((units, 1.0)),
            None if (1.0..1e3).contains(&number) || number == 0.0 => ("", 1.0),
            None => {
                let fits = |(_, size): &(&str, f64)| number >= *size;
                MAGNITUDES.into_iter().find(fits).unwrap_or(("u", 1e-6))
            }
        };
        format!("{} {units}", general(rounded(number / size, self.precision)))
    }

    /// Operations per second.
    pub fn flops(&self, number: f64) -> String {
        self.number(number) + "FLOPS"
    }

    /// Multiply-accumulates.
    pub fn macs(&self, number: f64) -> String {
        self.number(number) + "MACs"
    }

    /// Seconds.
    pub fn duration(&self, seconds: f64) -> String {
        self.number(seconds) + "s"
    }

    /// Bytes.
    pub fn bytes(&self, number: f64) -> String {
        self.number(number) + "B"
    }

    /// Parameters: 10⁹ of them are `B`, not `G`.
    pub fn params(&self, number: f64) -> String {
        let units = self.units.map(|units| if units == "B" { "G" } else { units });
        let text = NumberStyle { units, ..*self }.number(number);
        text.replace('G', "B").trim().to_owned()
    }
}

/// Rounds to so many digits behind the point, exact halves to the even one.
pub fn rounded(number: f64, digits: usize) -> f64 {
    // Printing a float rounds its exact binary value, as Python's `round` does.
    format!("{number:.digits$}").parse().unwrap_or(number)
}

/// C's `%g`: six significant digits, no zeros behind them, an exponent where the number is very large or small.
pub fn general(number: f64) -> String {
    if number == 0.0 || !number.is_finite() {
        return format!("{number}").to_lowercase();
    }
    let scientific = format!("{number:.5e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let without_zeros = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if (-4..6).contains(&exponent) {
        let digits = usize::try_from(5 - exponent).unwrap_or(0);
        return without_zeros(&format!("{number:.digits$}"));
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{}e{sign}{:02}", without_zeros(mantissa), exponent.abs())
}
