//! What memory is for, and how much of it is held: exact accounting by category.

/// What a block of memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Category {
    /// Model parameters as the kernels read them.
    Parameters,
    /// Gradients.
    Gradients,
    /// Master weights and optimizer states.
    Optimizer,
    /// Whatever forward leaves for backward, and intermediate results.
    Activations,
    /// Communication and staging buffers, lookup tables.
    Buffers,
}

impl Category {
    /// All of them, in the order reports list them.
    pub const ALL: [Category; 5] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Buffers,
    ];

    /// The name used in logs and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Buffers => "buffers",
        }
    }

    const fn index(self) -> usize {
        self as usize
    }
}

/// Bytes held now and at most since the last reset, by category.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    current_bytes: [usize; 5],
    peak_bytes: [usize; 5],
    current_total_bytes: usize,
    peak_total_bytes: usize,
}

impl MemoryUsage {
    /// Bytes held now for one category.
    pub fn current(&self, category: Category) -> usize {
        self.current_bytes[category.index()]
    }

    /// The most bytes ever held at once for one category.
    pub fn peak(&self, category: Category) -> usize {
        self.peak_bytes[category.index()]
    }

    /// Bytes held now.
    pub fn current_total(&self) -> usize {
        self.current_total_bytes
    }

    /// The most bytes ever held at once, over all categories together.
    pub fn peak_total(&self) -> usize {
        self.peak_total_bytes
    }

    /// Counts bytes that were taken.
    pub fn add(&mut self, category: Category, bytes: usize) {
        let index = category.index();
        self.current_bytes[index] += bytes;
        self.peak_bytes[index] = self.peak_bytes[index].max(self.current_bytes[index]);
        self.current_total_bytes += bytes;
        self.peak_total_bytes = self.peak_total_bytes.max(self.current_total_bytes);
    }

    /// Counts bytes that were given back.
    pub fn subtract(&mut self, category: Category, bytes: usize) {
        self.current_bytes[category.index()] -= bytes;
        self.current_total_bytes -= bytes;
    }

    /// Starts the peaks anew from what is held now.
    pub fn reset_peak(&mut self) {
        self.peak_bytes = self.current_bytes;
        self.peak_total_bytes = self.current_total_bytes;
    }
}

impl std::fmt::Display for MemoryUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes held", self.current_total_bytes)?;
        for category in Category::ALL {
            write!(f, ", {} {}", category.name(), self.current(category))?;
        }
        Ok(())
    }
}
