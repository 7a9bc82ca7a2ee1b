//! The one table of options: every key with its type, default, range, old spellings, status and one line of prose.
//!
//! Checking, "did you mean", the JSON schema and `docs/config.md` all read this table; an option exists nowhere else.

mod attention;
mod compression;
mod data;
mod features;
mod later;
mod optimizer;
mod precision;
mod root;
mod scheduler;
mod zero;

pub use root::ROOT;

/// One option.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// Its canonical name.
    pub name: &'static str,
    /// Other names that mean the same.
    pub aliases: &'static [&'static str],
    /// Its type and range.
    pub kind: Kind,
    /// Its default, as JSON.
    pub default: &'static str,
    /// Whether `null` may be written although the default is something else.
    pub nullable: bool,
    /// Whether its section is unusable without it.
    pub required: bool,
    /// Whether the program acts on it.
    pub status: Status,
    /// Set on old spellings.
    pub deprecated: Option<Deprecated>,
    /// Set where DeepSpeed's versions disagree about it.
    pub drift: Option<Drift>,
    /// One line for the manual.
    pub doc: &'static str,
}

/// Whether the program acts on an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It does.
    Implemented,
    /// What is said of the section it is in, or of the type that it is a parameter of, is said of it.
    NotYet,
    /// It has no meaning here, whatever its value; the text says why.
    Inert(&'static str),
    /// What one of its values asks for always happens.
    Always {
        /// The value, as JSON.
        value: &'static str,
        /// What happens.
        why: &'static str,
    },
    /// Any value but the default is refused; the text says why, and what to do instead.
    Refused(&'static str),
}

/// What an old spelling stands for.
#[derive(Debug, Clone, Copy)]
pub enum Deprecated {
    /// Another name of the same section, with the same values; given together, the two are refused.
    Renamed(&'static str),
    /// As [`Deprecated::Renamed`], but given together the new name wins.
    Superseded(&'static str),
    /// A switch that turned into a section: what `true` means there, as JSON. `false` leaves it out.
    Switch {
        /// The section.
        replaced_by: &'static str,
        /// Its content for `true`.
        on: &'static str,
    },
    /// It never did anything; the text says what to do instead.
    NoEffect(&'static str),
}

/// What became of an option between DeepSpeed 0.14.1 and 0.19.8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drift {
    /// Another default.
    Default {
        /// The new one, as JSON.
        default: &'static str,
        /// The first version that has it.
        since: &'static str,
    },
    /// 0.19.8 refuses a file that gives it.
    Refused,
}

/// The type and range of a value.
#[derive(Debug, Clone, Copy)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// An integer in a closed range.
    Int {
        /// The smallest.
        min: i64,
        /// The largest.
        max: i64,
    },
    /// After how many steps something comes again: an integer of at least one, or infinity (`Infinity`, `"inf"`), which is `null`.
    Interval,
    /// One of a few integers.
    IntChoice(&'static [i64]),
    /// A number in a range.
    Float(Range),
    /// Any string.
    Text,
    /// A string that may not be empty.
    NonEmptyText,
    /// One of a few strings.
    Choice {
        /// The permitted ones.
        values: &'static [&'static str],
        /// Whether `FP16` means `fp16`.
        any_case: bool,
    },
    /// The name of a number format: `fp32`, `fp16` or `bf16`, and the names that frameworks give them.
    DataType,
    /// A list of equals.
    List {
        /// What each is.
        item: &'static Kind,
        /// How many, if that is fixed.
        length: Option<usize>,
    },
    /// An object with known keys.
    Section(&'static [Key], Form),
    /// An object whose keys depend on the value of another key.
    Variants {
        /// That key.
        tag: Tag,
        /// The keys for each of its values.
        variants: &'static [Variant],
    },
    /// An object whose keys the user names.
    Named(&'static Kind),
    /// Anything; it is handed on as it is.
    Json,
    /// The first of these that the value fits.
    Either(&'static [Kind]),
}

/// Where the deciding key of [`Kind::Variants`] stands.
#[derive(Debug, Clone, Copy)]
pub enum Tag {
    /// Beside the object, as `optimizer.type` beside `optimizer.params`.
    Beside(&'static str),
    /// Within it, as `sparse_attention.mode`; the second is its default.
    Within(&'static str, &'static str),
}

/// The keys that go with one value of a tag.
#[derive(Debug, Clone, Copy)]
pub struct Variant {
    /// The value.
    pub tag: &'static str,
    /// The keys; `None` takes any.
    pub keys: Option<&'static [Key]>,
    /// Whether the program acts on this variant.
    pub status: Status,
}

/// How strictly a section reads its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Each value must have its type.
    Plain,
    /// `"yes"`, `1` and `"500000000"` are converted with a warning, and `"auto"` means the default, as DeepSpeed does.
    Schema,
}

/// A range of numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Range {
    /// The lower end.
    pub min: f64,
    /// Whether the lower end itself is outside.
    pub above_min: bool,
    /// The upper end.
    pub max: f64,
    /// Whether the upper end itself is outside.
    pub below_max: bool,
}

/// Zero or more.
pub(crate) const NON_NEGATIVE: Kind =
    Kind::Float(Range { min: 0.0, above_min: false, max: f64::MAX, below_max: false });
/// More than zero.
pub(crate) const POSITIVE: Kind =
    Kind::Float(Range { min: 0.0, above_min: true, max: f64::MAX, below_max: false });
/// From zero to one.
pub(crate) const FRACTION: Kind =
    Kind::Float(Range { min: 0.0, above_min: false, max: 1.0, below_max: false });
/// From zero to just below one.
pub(crate) const BETA: Kind = Kind::Float(Range { min: 0.0, above_min: false, max: 1.0, below_max: true });
/// Between zero and one.
pub(crate) const OPEN_FRACTION: Kind =
    Kind::Float(Range { min: 0.0, above_min: true, max: 1.0, below_max: true });
/// A count that may be zero.
pub(crate) const COUNT: Kind = Kind::Int { min: 0, max: i64::MAX };
/// A count of at least one.
pub(crate) const POSITIVE_COUNT: Kind = Kind::Int { min: 1, max: i64::MAX };
/// Any integer.
pub(crate) const ANY_INT: Kind = Kind::Int { min: i64::MIN, max: i64::MAX };
/// A list of strings.
pub(crate) const TEXT_LIST: Kind = Kind::List { item: &Kind::Text, length: None };
/// A list of counts.
pub(crate) const COUNT_LIST: Kind = Kind::List { item: &COUNT, length: None };

/// One of a few strings, in this spelling.
pub(crate) const fn choice(values: &'static [&'static str]) -> Kind {
    Kind::Choice { values, any_case: false }
}

/// An option of which nothing is said yet.
pub(crate) const fn key(name: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Key {
    Key {
        name,
        aliases: &[],
        kind,
        default,
        nullable: false,
        required: false,
        status: Status::NotYet,
        deprecated: None,
        drift: None,
        doc,
    }
}

impl Key {
    /// The program acts on it.
    pub(crate) const fn done(mut self) -> Key {
        self.status = Status::Implemented;
        self
    }

    /// It has no meaning here.
    pub(crate) const fn inert(mut self, why: &'static str) -> Key {
        self.status = Status::Inert(why);
        self
    }

    /// What this value asks for always happens.
    pub(crate) const fn always(mut self, value: &'static str, why: &'static str) -> Key {
        self.status = Status::Always { value, why };
        self
    }

    /// Nothing but its default is taken.
    pub(crate) const fn refused(mut self, why: &'static str) -> Key {
        self.status = Status::Refused(why);
        self
    }

    /// It has other names.
    pub(crate) const fn alias(mut self, aliases: &'static [&'static str]) -> Key {
        self.aliases = aliases;
        self
    }

    /// `null` may be written.
    pub(crate) const fn nullable(mut self) -> Key {
        self.nullable = true;
        self
    }

    /// Its section needs it.
    pub(crate) const fn required(mut self) -> Key {
        self.required = true;
        self
    }

    /// It has another default since a version.
    pub(crate) const fn since(mut self, since: &'static str, default: &'static str) -> Key {
        self.drift = Some(Drift::Default { default, since });
        self
    }

    /// DeepSpeed 0.19.8 refuses it.
    pub(crate) const fn refused_later(mut self) -> Key {
        self.drift = Some(Drift::Refused);
        self
    }

    /// It is an old spelling.
    pub(crate) const fn deprecated(mut self, deprecated: Deprecated) -> Key {
        self.deprecated = Some(deprecated);
        self
    }

    /// Whether `null` may be written.
    pub fn takes_null(&self) -> bool {
        self.nullable || self.default == "null"
    }

    /// The keys below this one, where they do not depend on another key's value.
    pub fn children(&self) -> Option<(&'static [Key], Form)> {
        match self.kind {
            Kind::Section(keys, form) => Some((keys, form)),
            Kind::Either(kinds) => kinds.iter().find_map(|kind| match kind {
                Kind::Section(keys, form) => Some((*keys, *form)),
                _ => None,
            }),
            _ => None,
        }
    }
}

/// Finds the variant with this tag, whatever the case of its letters.
pub fn find_variant(variants: &'static [Variant], tag: &str) -> Option<&'static Variant> {
    variants.iter().find(|variant| variant.tag.eq_ignore_ascii_case(tag))
}
