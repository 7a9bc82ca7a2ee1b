//! Zero.
