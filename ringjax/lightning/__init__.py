"""Lightning on ringjax: `Trainer(strategy=RingjaxStrategy())`, and the same for Fabric.

`import ringjax.lightning` also registers both strategies as `strategy="ringjax"`.
"""

from ringjax.lightning.strategy import RingjaxEnvironment as RingjaxEnvironment
from ringjax.lightning.strategy import RingjaxFabricStrategy as RingjaxFabricStrategy
from ringjax.lightning.strategy import RingjaxStrategy as RingjaxStrategy
